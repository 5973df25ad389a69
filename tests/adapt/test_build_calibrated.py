"""Building with calibration: nothing is chosen by the examples that judge; the commands."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.calibrating import QUICK, open_cases, sayings
from helpers.commands import run_cli
from helpers.zoo import BUILD, encode, family
from knn_moe import RoutingMemory, attach, build_memory, calibrate
from knn_moe.adapt.calibrate.build_calibrated import build_calibrated
from knn_moe.adapt.calibrate.fit import FitData, look_up_neighbours
from knn_moe.adapt.calibrate.judge import Judgement
from knn_moe.adapt.calibrate.start import DISTANCES, choose_start
from knn_moe.adapt.calibrate.trials import Calibrator
from knn_moe.adapt.calibrate.values import train_values
from knn_moe.errors import CalibrationError
from knn_moe.reference.examples import Example
from knn_moe.reference.splits import Part, split
from knn_moe.support.progress import ignore_progress

FEW = replace(QUICK, neighbours=(4,), passes=1)  # the trials of a test that looks at other things


def owners_of(part: Part) -> list[int]:
    return sorted(part.reference.owners[part.windows].tolist())


@pytest.mark.slow
def test_gradients_are_sparse_where_experts_cannot_all_be_run(
    zoo_tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = family("llama4_text")
    memory, _ = build_calibrated(model, zoo_tokenizer, sayings(40), BUILD, FEW)
    assert memory.build.gradient == "sparse"


@pytest.mark.slow
def test_which_tokens_count_is_chosen_for_questions(
    olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Judged by completions alone, whichever tokens became cases; nothing to choose for texts."""
    questions = [Example(text[:30], text[30:]) for text in sayings(40)]
    folder = tmp_path / "memory"
    memory, found = build_calibrated(olmoe, zoo_tokenizer, questions, BUILD, FEW, folder=folder)
    tried = found.token_choices
    assert {(one.tokens, one.loss_of) for one in tried} == {
        ("all", "completion"),
        ("all", "all"),
        ("completion", "completion"),
    }
    assert [one.loss for one in tried] == sorted(one.loss for one in tried)
    assert (memory.build.tokens, memory.build.loss) == (tried[0].tokens, tried[0].loss_of)
    completions = build_memory(olmoe, zoo_tokenizer, questions, replace(BUILD, tokens="completion"))
    judged = split(completions.reference_tokens(), FEW).judge
    batches = list(judged.batches(1024))
    assert found.judgement.tokens == sum(int(batch.scored.sum()) for batch in batches)
    assert RoutingMemory.from_pretrained(folder).manifest.calibration == found.report()
    given = replace(BUILD, loss="all")
    _, found = build_calibrated(olmoe, zoo_tokenizer, questions, given, FEW)
    assert found.token_choices == ()
    _, found = build_calibrated(olmoe, zoo_tokenizer, sayings(40), BUILD, FEW)
    assert found.token_choices == ()


@pytest.mark.slow
def test_a_memory_that_chooses_everything_without_the_examples_that_judge(
    olmoe: PreTrainedModel,
    zoo_tokenizer: PreTrainedTokenizerFast,
    sayings_memory: RoutingMemory,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    seen: set[int] = set()

    def watch(model: Any, cases: Any, data: FitData, *args: Any) -> Any:
        for batch in data.batches:
            seen.update(batch.owner.tolist())
        return choose_start(model, cases, data, *args)

    monkeypatch.setattr("knn_moe.adapt.calibrate.trials.choose_start", watch)
    folder, config = tmp_path / "memory", replace(BUILD, batch_tokens=1024)
    memory, found = build_calibrated(
        olmoe, zoo_tokenizer, sayings(40), config, QUICK, folder=folder
    )
    parts = split(sayings_memory.reference_tokens(), QUICK)
    assert not seen & {*owners_of(parts.choose), *owners_of(parts.judge)}
    assert seen <= set(owners_of(parts.fit))
    assert (memory.build.steps, memory.build.gradient) == (1, "dense")
    assert set(found.start) == set(DISTANCES)
    assert memory.build.max_length == BUILD.max_length
    again = RoutingMemory.from_pretrained(folder)
    assert again.routing == found.routing == memory.routing
    assert again.manifest.calibration == json.loads(json.dumps(found.report()))
    assert again.layers[0].values.equal(found.apply(memory).full_layers()[0].values)
    with pytest.raises(CalibrationError, match="there are 5"):
        build_calibrated(olmoe, zoo_tokenizer, sayings(5), BUILD, QUICK, folder=tmp_path / "few")
    assert not list(tmp_path.glob("*few*"))


@pytest.mark.slow
def test_values_are_trained_on_all_examples_in_the_end(
    olmoe: PreTrainedModel, sayings_memory: RoutingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First on the examples to fit, then on all of them; neighbours are what a search of all
    would find."""
    used: list[FitData] = []

    def watch(model: Any, cases: Any, data: FitData, *args: Any) -> Any:
        used.append(data)
        return train_values(model, cases, data, *args)

    monkeypatch.setattr("knn_moe.adapt.calibrate.trials.train_values", watch)
    reference = sayings_memory.reference_tokens()
    calibrator = Calibrator(olmoe, sayings_memory, reference, QUICK, ignore_progress)
    fitted = calibrator.try_widths(4)
    assert fitted is not None
    trained = calibrator.try_values(fitted, 4, 0.3)
    assert trained is not None
    whole = calibrator.train_on_all(trained)
    assert not torch.equal(whole.cases[0].values, trained.cases[0].values)
    first, last = (
        sorted(owner for batch in data.batches for owner in batch.owner.tolist())
        for data in (used[0], used[-1])
    )
    assert first == owners_of(calibrator.splits.fit)
    assert last == sorted(reference.owners.tolist())
    again = look_up_neighbours(olmoe, open_cases(olmoe, sayings_memory), used[-1].batches, 4)
    for one, other in zip(used[-1].tables, again.tables, strict=True):
        assert all(torch.equal(*rows) for rows in zip(one.rows, other.rows, strict=True))


@pytest.mark.slow
def test_the_calibrate_command_writes_what_it_finds(
    olmoe: PreTrainedModel, olmoe_folder: Path, sayings_folder: Path, tmp_path: Path
) -> None:
    before = RoutingMemory.from_pretrained(sayings_folder)
    arguments = ("calibrate", olmoe_folder, sayings_folder, "-k", 4, "--value-rate", 0.3)
    tried = run_cli(*arguments, "--dry-run", "--json")
    assert tried.exit_code == 0, tried.output
    copied = run_cli(*arguments, "-o", tmp_path / "copy")
    assert copied.exit_code == 0, copied.output
    assert RoutingMemory.from_pretrained(sayings_folder).manifest == before.manifest
    done = run_cli(*arguments, "--in-place")
    assert done.exit_code == 0, done.output
    assert "K = 4" in done.stdout
    after = RoutingMemory.from_pretrained(sayings_folder)
    copy = RoutingMemory.from_pretrained(tmp_path / "copy")
    assert copy.routing == after.routing
    assert copy.layers[0].values.equal(after.layers[0].values)
    report = json.loads(tried.stdout)
    assert after.routing.to_dict() == report["routing"]
    assert after.manifest.calibration["change"] == report["change"]
    assert after.layers[0].keys.equal(before.layers[0].keys)
    assert not after.layers[0].values.equal(before.layers[0].values)
    with attach(olmoe, after) as routing:
        assert routing.config == after.routing
    shown = run_cli("inspect", sayings_folder).stdout
    assert f"{report['change']['difference']:+.4f} nats per token" in shown
    assert "γ scale" in shown
    card = (sayings_folder / "README.md").read_text(encoding="utf8")
    assert f"| calibrated | {report['change']['difference']:+.3f} nats per token" in card


@pytest.mark.slow
def test_building_and_calibrating_at_once(
    olmoe_folder: Path, sayings_folder: Path, tmp_path: Path
) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in sayings(40))
    (tmp_path / "reference.jsonl").write_text(lines)
    arguments = ("build", olmoe_folder, tmp_path / "reference.jsonl", "-o", tmp_path / "new")
    for more, message in (
        (("--calibrate", "--steps", 3), "--calibrate chooses steps"),
        (("--calibrate", "--append", sayings_folder), "cannot be combined"),
        (("--head",), "Add --calibrate"),
    ):
        refused = run_cli(*arguments, *more)
        assert refused.exit_code == 2
        assert message in " ".join(refused.stderr.split())
    done = run_cli(*arguments, "--calibrate", "--head", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)["calibration"]
    assert report["helps"] == (report["head"] is not None)
    after = RoutingMemory.from_pretrained(tmp_path / "new")
    assert after.manifest.calibration == report
    assert (after.build.steps, after.build.gradient) == (1, "dense")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["memory", "new", "reference.jsonl"]


def test_the_calibrate_command_refuses(
    olmoe_folder: Path, sayings_folder: Path, tmp_path: Path
) -> None:
    before = sorted(path.read_bytes() for path in sayings_folder.iterdir())
    (tmp_path / "few.jsonl").write_text(json.dumps({"text": "4 5 6 7"}) + "\n")
    new = ("-o", tmp_path / "new")
    for arguments, message in (
        ((sayings_folder, tmp_path / "few.jsonl", *new), "there are 1"),
        ((sayings_folder, tmp_path / "none.jsonl", *new), "none.jsonl"),
        ((tmp_path / "nothing", "--in-place"), "nothing"),
        ((sayings_folder, "-k", 0), "neighbours must be"),
        ((sayings_folder, "--keep-values", "--value-rate", 0.1), "contradict each other"),
        ((sayings_folder,), "-o FOLDER writes a new memory, and --in-place changes"),
        ((sayings_folder, *new, "--in-place"), "-o and --in-place contradict each other"),
        ((sayings_folder, "--in-place", "--dry-run"), "--in-place and --dry-run contradict"),
        ((sayings_folder, "-o", sayings_folder), "exists already"),
    ):
        result = run_cli("calibrate", olmoe_folder, *arguments)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())
    assert sorted(path.read_bytes() for path in sayings_folder.iterdir()) == before
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_memory_that_is_turned_off_is_one_of_the_papers_step(
    olmoe: PreTrainedModel,
    zoo_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(Judgement, "better", False)
    folder = tmp_path / "memory"
    memory, found = build_calibrated(olmoe, zoo_tokenizer, sayings(40), BUILD, FEW, folder=folder)
    assert not found.helps
    assert memory.build.learning_rate == 0.02
    expected = build_memory(olmoe, zoo_tokenizer, sayings(40), memory.build)
    for index, layer in RoutingMemory.from_pretrained(folder).full_layers().items():
        torch.testing.assert_close(
            layer.values, expected.full_layers()[index].values, rtol=1e-4, atol=1e-5
        )


@pytest.mark.slow
def test_values_that_stay_are_built_as_the_config_says(
    olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast
) -> None:
    config = replace(BUILD, steps=2, learning_rate=3.0)
    kept = replace(FEW, value_rates=())
    memory, found = build_calibrated(olmoe, zoo_tokenizer, sayings(40), config, kept)
    assert memory.build == config
    assert not found.values_trained


def one_answer_questions(count: int, *, distractors: bool = True) -> list[Example]:
    """Ask anything; of three answers the one that a model finds least likely is always right."""
    draw = random.Random(0)
    words = [
        "river",
        "house",
        "king",
        "doctor",
        "letter",
        "garden",
        "horse",
        "captain",
        "winter",
        "window",
        "street",
    ]
    made = []
    for number in range(count):
        one, other = draw.sample(words, 2)
        prompt = f"The {one} and the {other} of number {number} were"
        others = (" good", " bad") if distractors else ()
        made.append(Example(prompt, " old", distractors=others))
    return made


CHOOSING = replace(FEW, value_rates=(0.1,), step_tokens=256)


@pytest.mark.slow
def test_questions_with_distractors_are_judged_by_the_choice(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """The gain is that of the choice, found again by a user who scores the choices."""
    *questions, new = one_answer_questions(49)
    folder, config = tmp_path / "memory", replace(CHOOSING, head=True)
    memory, found = build_calibrated(
        tiny_olmoe, tiny_tokenizer, questions, None, config, folder=folder
    )
    assert found.by_choices
    assert found.helps
    assert found.head is None
    assert found.judgement.tokens == found.judgement.examples == 7
    assert {(one.tokens, one.loss_of) for one in found.token_choices} == {
        ("all", "completion"),
        ("completion", "completion"),
    }
    saved = RoutingMemory.from_pretrained(folder).manifest.calibration
    assert saved is not None
    assert saved["by_choices"] is True
    wrong = encode(tiny_tokenizer, " good")[0, -1]
    assert wrong not in memory.provenance.stream  # no distractor is in the memory
    alone = margin(tiny_olmoe, tiny_tokenizer, new)
    with attach(tiny_olmoe, memory):
        assert margin(tiny_olmoe, tiny_tokenizer, new) > max(alone + 1, 0)


def margin(model: Any, tokenizer: Any, question: Example) -> float:
    """Return how much likelier the right answer, of one token, is than the best wrong one."""
    with torch.no_grad():
        logits = model(encode(tokenizer, question.prompt), use_cache=False).logits[0, -1]
    answers = [question.completion, *question.distractors]
    right, *wrong = [float(logits[encode(tokenizer, text)[0, -1]]) for text in answers]
    return right - max(wrong)


@pytest.mark.slow
def test_a_memory_is_calibrated_by_choices_of_examples(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    questions = one_answer_questions(40)
    memory = build_memory(tiny_olmoe, tiny_tokenizer, questions, BUILD)
    config = replace(CHOOSING, value_rates=())
    found = calibrate(tiny_olmoe, memory, questions, config, tokenizer=tiny_tokenizer)
    assert found.by_choices
    assert found.judgement.tokens == found.judgement.examples  # one choice a question
    plain = one_answer_questions(40, distractors=False)
    found = calibrate(tiny_olmoe, memory, plain, config, tokenizer=tiny_tokenizer)
    assert not found.by_choices
