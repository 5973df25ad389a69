"""What a memory says is chosen too: targets, divergence, and the commands that calibrate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from knn_moe.adapt.calibrate.splits import Slice, own_reference, split
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.calibrating import QUICK, cases_of, folders, found, memory, model, sayings, study  # noqa: F401
from helpers.commands import knn_moe
from helpers.zoo import BUILD, family
from knn_moe import (
    RoutingConfig,
    RoutingMemory,
    attach,
    build_memory,
    calibrate,
    find_routers,
)
from knn_moe.adapt.calibrate.build_calibrated import build_calibrated
from knn_moe.adapt.calibrate.fit import Studied, find_neighbours
from knn_moe.adapt.calibrate.judge import Baseline, judge
from knn_moe.adapt.calibrate.result import Calibration, Candidate
from knn_moe.adapt.calibrate.targets import CONFIDENCE_FACTORS, RATES, choose_targets, ranked
from knn_moe.adapt.calibrate.trials import Workbench
from knn_moe.adapt.calibrate.values import learn_values
from knn_moe.adapt.calibrate.widths import DivergedError
from knn_moe.config import PRESETS
from knn_moe.errors import (
    CalibrationError,
)
from knn_moe.reference.provenance import owners


def test_targets_are_worth_what_a_memory_of_them_is(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, memory: RoutingMemory
) -> None:
    """The loss of the best way, against a memory of the sample built in that way and judged."""
    owner = owners(memory.provenance)
    readings = list(Slice(own_reference(memory), [*range(len(owner))], owner).readings(1024))
    tried = choose_targets(model, find_routers(model), readings, BUILD)
    assert [way.loss for way in tried[1:]] == sorted(way.loss for way in tried[1:])
    ways = {(way.gradient, way.learning_rate, way.steps) for way in tried}
    rates = [("dense", rate) for rate in RATES] + [("sparse", 1.0)]
    assert ways == {(*way, steps) for way in rates for steps in (1, 5)}
    for way in (min(tried, key=lambda way: way.loss), tried[-1]):
        built = build_memory(model, tokenizer, sayings(40), way.of(BUILD))
        gammas = {layer: one.gamma for layer, one in built.full_layers().items()}
        cases = cases_of(model, built)
        assert [each.gamma for each in cases] == list(gammas.values())
        alone = Baseline.of(model, readings)
        ways = [
            RoutingConfig(**PRESETS["strong"]["routing"], confidence_factor=confidence_factor)
            for confidence_factor in CONFIDENCE_FACTORS
        ]
        judged = [judge(model, cases, alone, routing) for routing in ways]
        assert way.loss == pytest.approx(min(one.loss for one in judged), abs=0.1)
    assert tried[0].loss < judged[0].alone


def test_where_not_all_experts_can_be_asked_the_others_are_tried_at_every_rate(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = family("llama4_text")
    memory = build_memory(model, tokenizer, sayings(24), BUILD)
    owner = owners(memory.provenance)
    readings = list(Slice(own_reference(memory), [*range(24)], owner).readings(256))
    tried = choose_targets(model, find_routers(model), readings, BUILD)
    ways = {(way.gradient, way.learning_rate, way.steps) for way in tried}
    assert ways == {("sparse", rate, steps) for rate in RATES for steps in (1, 5)}


@pytest.mark.parametrize(
    ("dense", "alone", "first"),
    [(4.04, 4.1, "dense"), (4.06, 4.1, "sparse"), (4.04, None, "sparse"), (3.9, None, "dense")],
)
def test_dense_targets_go_before_sparse_ones_where_values_will_learn(
    dense: float, alone: float | None, first: str
) -> None:
    ways = [Candidate("sparse", 1.0, 1, 4.0), Candidate("sparse", 0.1, 1, 4.001)]
    ways += [Candidate("dense", 1.0, 5, dense), Candidate("dense", 0.1, 5, dense + 0.001)]
    found = ranked(ways, alone)
    assert (found[0].gradient, found[0].loss) == (first, 4.0 if first == "sparse" else dense)
    assert sorted(found, key=id) == sorted(ways, key=id)


def test_targets_are_chosen_without_those_who_judge(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    memory: RoutingMemory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: set[int] = set()

    def watched(*args: Any, **kwargs: Any) -> Any:
        for reading in args[2]:
            seen.update(reading.example.tolist())
        return choose_targets(*args, **kwargs)

    monkeypatch.setattr("knn_moe.adapt.calibrate.build_calibrated.choose_targets", watched)
    build_calibrated(model, tokenizer, sayings(40), replace(BUILD, batch_tokens=1024), QUICK)
    parts = split(own_reference(memory), QUICK)
    for part in (parts.choosing, parts.judging):
        assert not seen & set(part.owner[part.windows].tolist())
    assert seen <= set(parts.fitting.owner[parts.fitting.windows].tolist())


def test_values_learn_from_all_examples_in_the_end(
    model: PreTrainedModel, memory: RoutingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From those that are fitted, to be judged; then from all of them, what is recalled for each
    being what a search of all would find."""
    seen: list[Studied] = []

    def watched(model: Any, cases: Any, studied: Studied, *args: Any) -> Any:
        seen.append(studied)
        return learn_values(model, cases, studied, *args)

    monkeypatch.setattr("knn_moe.adapt.calibrate.trials.learn_values", watched)
    bench = Workbench(model, memory, own_reference(memory), QUICK, lambda *done: None)
    fitted = bench.fit_widths(4)
    assert fitted is not None
    taught = bench.learn_values(fitted, 0.3)
    assert taught is not None
    whole = bench.learn_from_all(taught)
    assert not torch.equal(whole.cases[0].values, taught.cases[0].values)
    parts = bench.parts
    first, last = (
        sorted(example for reading in part.readings for example in reading.example.tolist())
        for part in (seen[0], seen[-1])
    )
    assert first == sorted(parts.fitting.owner[parts.fitting.windows].tolist())
    assert last == sorted(parts.fitting.owner.tolist())
    anew = find_neighbours(model, cases_of(model, memory), seen[-1].readings, 4)
    for one, other in zip(seen[-1].neighbours, anew.neighbours, strict=True):
        assert all(torch.equal(*rows) for rows in zip(one.rows, other.rows, strict=True))


def test_what_leads_nowhere_is_left_out(
    model: PreTrainedModel, memory: RoutingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(*args: Any, **kwargs: Any) -> None:
        raise DivergedError

    monkeypatch.setattr("knn_moe.adapt.calibrate.trials.learn_values", diverge)
    kept = calibrate(model, memory, config=QUICK)
    assert [trial.name for trial in kept.trials] == [
        "widths, K = 4",
        "widths, K = 1",
        "as it was",
    ]
    assert kept.chosen == "widths, K = 4"
    assert not kept.learned
    monkeypatch.setattr("knn_moe.adapt.calibrate.trials.fit_widths", diverge)
    with pytest.raises(CalibrationError, match="finite loss"):
        calibrate(model, memory, config=QUICK)


def test_values_may_stay(model: PreTrainedModel, memory: RoutingMemory) -> None:
    kept = calibrate(model, memory, config=replace(QUICK, value_rates=()))
    assert kept.helps
    assert kept.values is None
    assert set(kept.update_scale.values()) == {1.0}
    used = kept.apply(memory)
    assert not used.manifest.learned
    # As it is used now was chosen by examples that may judge this time.
    again = calibrate(model, used, config=replace(QUICK, value_rates=(), seed=1))
    assert [trial.name for trial in again.trials] == ["widths, K = 4", "widths, K = 1"]


@pytest.mark.parametrize("gradient", ["sparse", "dense"])
def test_values_learn_by_the_build_s_gradient_and_every_step_is_told(
    gradient: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, told = [], []

    def watched(*args: Any, **kwargs: Any) -> Any:
        asked.append(args[4].gradient)
        return learn_values(*args, **kwargs)

    monkeypatch.setattr("knn_moe.adapt.calibrate.trials.learn_values", watched)
    memory = build_memory(model, tokenizer, sayings(40), replace(BUILD, gradient=gradient))
    found = calibrate(
        model,
        memory,
        config=QUICK,
        on_progress=lambda what, done, total: told.append((done, total)),
    )
    assert set(asked) == {gradient}
    assert len(asked) == 1 + (found.learned and found.helps)
    passed = QUICK.passes * (0 if len(asked) == 2 else len(_everything(memory)))
    assert told[-1][0] == told[-1][1] - passed
    assert found.report()["update_scale"].keys() == {"0", "1"}


def _everything(memory: RoutingMemory) -> list[Any]:
    """The batches that values learn from at last."""
    tokens = len(memory.provenance.stream)
    part = split(own_reference(memory), QUICK).everything
    return list(part.readings(min(QUICK.step_tokens, max(tokens // 24, 64))))


def test_values_that_are_no_numbers(model: PreTrainedModel, memory: RoutingMemory) -> None:
    layers = {
        index: replace(layer, values=layer.values * float("nan"))
        for index, layer in memory.full_layers().items()
    }
    with pytest.raises(CalibrationError, match="finite loss"):
        calibrate(model, replace(memory, layers=layers, folder=None), config=QUICK)


def test_distances_are_those_of_the_cases_recalled(
    model: PreTrainedModel, memory: RoutingMemory, found: Calibration
) -> None:
    cases = cases_of(model, memory)
    studied = study(model, memory, cases)
    for each, near in zip(cases, studied.neighbours, strict=True):
        one = found.distances[each.router.layer]
        assert one.nearest == pytest.approx(near.mean_distance(0), rel=1e-3)
        assert one.last == pytest.approx(near.mean_distance(found.routing.k - 1), rel=1e-3)
        assert 0 < one.nearest <= one.last


def test_a_memory_that_chooses_everything(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder, config = tmp_path / "memory", replace(BUILD, batch_tokens=1024)
    memory, found = build_calibrated(model, tokenizer, sayings(40), config, QUICK, folder=folder)
    best = found.targets[0]
    assert (memory.build.learning_rate, memory.build.steps) == (best.learning_rate, best.steps)
    assert memory.build.max_length == BUILD.max_length
    again = RoutingMemory.from_pretrained(folder)
    assert again.routing == found.routing == memory.routing
    assert again.manifest.calibration == json.loads(json.dumps(found.report()))
    assert again.layers[0].values.equal(found.apply(memory).full_layers()[0].values)
    with pytest.raises(CalibrationError, match="5 different examples"):
        build_calibrated(model, tokenizer, sayings(5), BUILD, QUICK, folder=tmp_path / "few")
    assert not list(tmp_path.glob("*few*"))


# The command


def test_the_command_writes_what_it_finds(
    folders: tuple[Path, Path], model: PreTrainedModel
) -> None:
    network, folder = folders
    before = RoutingMemory.from_pretrained(folder)
    asked = ("calibrate", network, folder, "-k", 4, "--value-rate", 0.3)
    tried = knn_moe(*asked, "--dry-run", "--json")
    assert tried.exit_code == 0, tried.output
    assert RoutingMemory.from_pretrained(folder).manifest == before.manifest
    done = knn_moe(*asked)
    assert done.exit_code == 0, done.output
    assert "K = 4" in done.stdout
    after = RoutingMemory.from_pretrained(folder)
    said = json.loads(tried.stdout)
    assert after.routing.to_dict() == said["routing"]
    assert after.manifest.calibration["change"] == said["change"]
    assert after.layers[0].keys.equal(before.layers[0].keys)
    assert not after.layers[0].values.equal(before.layers[0].values)
    with attach(model, after) as routing:
        assert routing.config == after.routing
    shown = knn_moe("inspect", folder).stdout
    assert f"{said['change']['difference']:+.4f} nats per token" in shown
    assert "γ scale" in shown
    card = (folder / "README.md").read_text(encoding="utf8")
    assert f"| calibrated | {said['change']['difference']:+.3f} nats a token" in card


def test_building_and_calibrating_at_once(folders: tuple[Path, Path], tmp_path: Path) -> None:
    network, _ = folders
    lines = "".join(json.dumps({"text": text}) + "\n" for text in sayings(40))
    (tmp_path / "reference.jsonl").write_text(lines)
    arguments = ("build", network, tmp_path / "reference.jsonl", "-o", tmp_path / "new")
    for more, message in (
        (("--steps", 3), "--calibrate chooses steps"),
        (("--append", folders[1]), "cannot be combined"),
    ):
        refused = knn_moe(*arguments, "--calibrate", *more)
        assert refused.exit_code == 2
        assert message in " ".join(refused.stderr.split())
    done = knn_moe(*arguments, "--calibrate", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    after = RoutingMemory.from_pretrained(tmp_path / "new")
    assert after.manifest.calibration == said["calibration"]
    assert after.build.learning_rate == said["calibration"]["targets"][0]["learning_rate"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("memory", "model", "new", "reference.jsonl")
    ]


def test_the_command_refuses(folders: tuple[Path, Path], tmp_path: Path) -> None:
    network, folder = folders
    before = sorted(path.read_bytes() for path in folder.iterdir())
    (tmp_path / "few.jsonl").write_text(json.dumps({"text": "4 5 6 7"}) + "\n")
    for arguments, message in (
        ((network, folder, tmp_path / "few.jsonl"), "1 different examples"),
        ((network, folder, tmp_path / "none.jsonl"), "none.jsonl"),
        ((network, tmp_path / "nothing"), "nothing"),
        ((network, folder, "-k", 0), "neighbours must be"),
        ((network, folder, "--keep-values", "--value-rate", 0.1), "contradict each other"),
    ):
        result = knn_moe("calibrate", *arguments)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())
    assert sorted(path.read_bytes() for path in folder.iterdir()) == before
