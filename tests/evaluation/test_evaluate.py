"""Evaluation: the right numbers, the same ones again, whatever the batch size and after a kill."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers.quiz import WORDS, make_questions, make_quiz
from knn_moe import BuildConfig, Example, build_memory
from knn_moe.errors import ConfigError, ModelError, RunError, TaskDataError
from knn_moe.evaluation.compare import matched
from knn_moe.evaluation.evaluate import EvalConfig, ask, evaluate
from knn_moe.evaluation.store import read_run, read_runs
from knn_moe.methods import KnnMoe, Method, ZeroShot
from knn_moe.report.runs import render_runs
from knn_moe.support.embedded_models import embedded_model
from knn_moe.tasks import Choice, Number, Task, TaskData, Text, answers
from knn_moe.tasks.questions import batches, chosen_rows, prompt_ids
from knn_moe.tasks.reference_set import reference_examples, reference_rows
from knn_moe.tasks.sample import Sample
from knn_moe.tasks.task import Options

LIKELY = EvalConfig(scoring="likelihood", batch_size=4)


@pytest.fixture(scope="module")
def quiz() -> TaskData:
    return make_quiz()


@pytest.fixture(scope="module")
def knn(tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, quiz: TaskData) -> KnnMoe:
    examples = reference_examples(tiny_tokenizer, quiz, "likelihood")
    return KnnMoe(build_memory(tiny_olmoe, tiny_tokenizer, examples, BuildConfig(preset="strong")))


def by_hand(tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, row: dict[str, Any]) -> list[float]:
    """Each choice read whole, one after the other, without cache, padding or batches."""
    context = f"Question: {row['question']}\nAnswer:"
    start = len(tiny_tokenizer(context)["input_ids"])
    found = []
    for choice in row["choices"]:
        ids = torch.tensor([tiny_tokenizer(f"{context} {choice}")["input_ids"]])
        with torch.no_grad():
            likely = tiny_olmoe(ids, use_cache=False).logits[0, :-1].float().log_softmax(dim=-1)
        tokens = likely.gather(1, ids[0, 1:, None]).squeeze(1)
        found.append(tokens[start - 1 :].sum().item())
    return found


@pytest.mark.parametrize("method_name", ["zero-shot", "knn"])
@pytest.mark.parametrize("size", [1, 16])
def test_likelihoods_are_those_of_a_plain_loop(
    method_name: str,
    size: int,
    tiny_olmoe: PreTrainedModel,
    tiny_tokenizer: Any,
    quiz: TaskData,
    knn: KnnMoe,
    tmp_path: Path,
) -> None:
    method: Method = knn if method_name == "knn" else ZeroShot()
    config = EvalConfig(scoring="likelihood", batch_size=size)
    run = evaluate(tiny_olmoe, tiny_tokenizer, quiz, method, config, folder=tmp_path / "run")
    found = {sample.id: sample for sample in run.samples}
    assert len(found) == 18
    with method.apply_to(tiny_olmoe):
        for row in quiz.test:
            expected = by_hand(tiny_olmoe, tiny_tokenizer, row)
            sample = found[row["id"]]
            assert sample.likelihoods == pytest.approx(expected, abs=2e-3)
            even = [a / len(b) for a, b in zip(expected, row["choices"], strict=True)]
            first, second = sorted(even, reverse=True)[:2]
            assert sample.margin == pytest.approx(first - second, abs=1e-3)
            if not sample.near_tie:
                assert sample.parsed == "ABCDE"[even.index(max(even))]
            assert sample.score == (sample.parsed == "ABCDE"[row["answer"]])


def test_a_memory_changes_the_answers_and_comes_off(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, quiz: TaskData, knn: KnnMoe, tmp_path: Path
) -> None:
    alone = evaluate(
        tiny_olmoe, tiny_tokenizer, quiz, ZeroShot(), LIKELY, folder=tmp_path / "zero-shot"
    )
    recalled = evaluate(tiny_olmoe, tiny_tokenizer, quiz, knn, LIKELY, folder=tmp_path / "knn")
    again = evaluate(
        tiny_olmoe, tiny_tokenizer, quiz, ZeroShot(), LIKELY, folder=tmp_path / "again"
    )
    assert alone.samples == again.samples
    pairs = matched(recalled, alone)
    assert all(ours.likelihoods != theirs.likelihoods for ours, theirs in pairs)


def test_the_load_of_routers_is_measured_where_asked(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, quiz: TaskData, knn: KnnMoe, tmp_path: Path
) -> None:
    losses = []
    for name, method in (("alone", ZeroShot()), ("knn", knn)):
        config = EvalConfig(scoring="likelihood", load=True)
        run = evaluate(tiny_olmoe, tiny_tokenizer, quiz, method, config, folder=tmp_path / name)
        losses.append(run.facts["load_balancing_loss"])
    top = tiny_olmoe.config.num_experts_per_tok
    assert all(top * 0.9 < loss < 3 * top for loss in losses)
    assert losses[0] != losses[1]


def test_two_runs_are_the_same_to_the_last_byte(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, quiz: TaskData, knn: KnnMoe, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        evaluate(tiny_olmoe, tiny_tokenizer, quiz, knn, LIKELY, folder=tmp_path / name)
    one, two = ((tmp_path / name / "samples.jsonl").read_bytes() for name in ("one", "two"))
    assert one == two


class KilledError(Exception):
    pass


@pytest.mark.parametrize("torn", [False, True])
def test_after_a_kill_it_goes_on_to_the_same_result(
    torn: bool, tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, quiz: TaskData, tmp_path: Path
) -> None:
    whole = evaluate(
        tiny_olmoe, tiny_tokenizer, quiz, ZeroShot(), LIKELY, folder=tmp_path / "whole"
    )

    def kill(done: int, total: int) -> None:
        if done > total // 2:
            raise KilledError

    folder = tmp_path / "killed"
    with pytest.raises(KilledError):
        evaluate(
            tiny_olmoe, tiny_tokenizer, quiz, ZeroShot(), LIKELY, folder=folder, on_progress=kill
        )
    samples = folder / "samples.jsonl"
    assert 0 < len(read_run(folder).samples) < 18
    if torn:  # in the middle of a batch, of a line, and of a character
        samples.write_bytes(samples.read_bytes()[:-40] + "é".encode()[:1])
    with pytest.raises(RunError, match="Not finished: quiz/zero-shot"):
        read_runs(tmp_path)
    resumed = evaluate(
        tiny_olmoe, tiny_tokenizer, quiz, ZeroShot(), LIKELY, folder=folder, resume=True
    )
    assert sorted(resumed.samples, key=by_id) == sorted(whole.samples, key=by_id)
    lines = samples.read_text(encoding="utf8").splitlines()
    assert len(lines) == len({json.loads(line)["id"] for line in lines}) == 18


def by_id(sample: Sample) -> str:
    return sample.id


def test_a_run_that_is_there_is_not_written_over(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, quiz: TaskData, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    evaluate(tiny_olmoe, tiny_tokenizer, quiz, ZeroShot(), LIKELY, folder=folder)
    with pytest.raises(RunError, match="--resume, or replace it with --overwrite"):
        evaluate(tiny_olmoe, tiny_tokenizer, quiz, ZeroShot(), LIKELY, folder=folder)
    other = EvalConfig(scoring="likelihood", batch_size=5)
    with pytest.raises(RunError, match=r"has settings .*cannot be gone on with"):
        evaluate(tiny_olmoe, tiny_tokenizer, quiz, ZeroShot(), other, folder=folder, resume=True)
    evaluate(tiny_olmoe, tiny_tokenizer, quiz, ZeroShot(), other, folder=folder, overwrite=True)


def test_generation_is_parsed_and_scored(
    tiny_olmoe: PreTrainedModel,
    tiny_tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model's own words for each prompt alone, and the score of a right output."""
    rows = [{"question": f"What is {number} + 1? {'Well? ' * number}", "answer": str(number + 1)}
            for number in range(5)]  # fmt: skip
    task = Task(name="sums", title="Sums", kind=Number(), files="sums")
    data = TaskData(task, rows, [], "made up")
    config = EvalConfig(batch_size=3, max_new_tokens=8)
    run = evaluate(tiny_olmoe, tiny_tokenizer, data, ZeroShot(), config, folder=tmp_path / "run")
    for sample in run.samples:
        row = rows[int(sample.id)]
        ids = torch.tensor([prompt_ids(tiny_tokenizer, task.kind.prompt(row))])
        written = tiny_olmoe.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        alone = tiny_tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
        assert sample.output == alone
        assert sample.score == task.kind.judge(alone, row).score
        with torch.no_grad():
            loss = tiny_olmoe(ids, labels=ids).loss
        assert sample.nll == pytest.approx(loss.item(), abs=1e-4)
    right = [f"The answer is {row['answer']}." for row in rows[:3]]
    monkeypatch.setattr(answers, "_generate", lambda *_: right)
    answer = answers.by_generation(tiny_olmoe, tiny_tokenizer, task, 8)
    assert [
        sample.score for sample in answer(ask(tiny_tokenizer, data, config).questions[:3], 0)
    ] == [1] * 3


def test_text_is_scored_by_windows(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    task = Task(name="words", title="Words", kind=Text(), files="words")
    texts = [{"text": " ".join(WORDS * 4)}, {"text": " ".join(reversed(WORDS * 3))}]
    data = TaskData(task, texts, [], "made up")
    config = EvalConfig(length=32, batch_size=2)
    run = evaluate(tiny_olmoe, tiny_tokenizer, data, ZeroShot(), config, folder=tmp_path / "run")
    ids = [token for row in texts for token in tiny_tokenizer(row["text"])["input_ids"]]
    assert len(run.samples) == len(ids) // 32
    window = torch.tensor([ids[32:64]])
    with torch.no_grad():
        output = tiny_olmoe(window, labels=window)
    sample = next(sample for sample in run.samples if sample.id == "window-1")
    assert sample.nll == pytest.approx(output.loss.item(), abs=1e-4)
    likeliest = output.logits[0, :-1].argmax(dim=-1)
    assert sample.score == pytest.approx((likeliest == window[0, 1:]).float().mean().item())
    with pytest.raises(TaskDataError, match="tokens of text, and a window has 100000"):
        ask(tiny_tokenizer, data, EvalConfig(length=100000))


def test_questions_are_drawn_and_put_in_batches_the_same_way_every_time(
    tiny_tokenizer: Any, quiz: TaskData
) -> None:
    few = [name for name, _ in chosen_rows(quiz, 5, seed=3)]
    assert few == [name for name, _ in chosen_rows(quiz, 5, seed=3)]
    assert few != [name for name, _ in chosen_rows(quiz, 5, seed=4)]
    asked = ask(tiny_tokenizer, quiz, LIKELY)
    assert sorted(place for batch in asked.batches for place in batch) == list(range(18))
    for batch in asked.batches:
        assert len(batch) <= 4
        assert len({len(asked.questions[place].ids) for place in batch}) == 1
    lengths = [len(asked.questions[batch[0]].ids) for batch in asked.batches]
    assert lengths == sorted(lengths)
    assert max(map(len, batches(asked.questions, 7, one_length=False))) == 7


def test_an_end_that_a_tokenizer_adds_is_not_asked_for(tiny_tokenizer: Any, quiz: TaskData) -> None:
    ending = copy.deepcopy(tiny_tokenizer)
    end = ending.eos_token
    ending.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, ending.eos_token_id)]
    )
    assert ending("word")["input_ids"][-1] == ending.eos_token_id
    plain, ended = (ask(one, quiz, LIKELY).questions for one in (tiny_tokenizer, ending))
    assert [question.choices for question in ended] == [question.choices for question in plain]
    assert prompt_ids(ending, "word") == prompt_ids(tiny_tokenizer, "word")


def test_questions_longer_than_a_model_reads_are_told(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    row = {**make_questions(1)[0], "question": "word " * 3000}
    data = TaskData(Task(name="long", title="Long", kind=Choice(), files="long"), [row], [], "")
    with pytest.raises(TaskDataError, match=r"1 questions of long are longer than the .*0-0"):
        evaluate(tiny_olmoe, tiny_tokenizer, data, ZeroShot(), LIKELY, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Halves(Choice):
    """Words cut in two: a choice changes how the end of its context is tokenised."""

    def options(self, row: Any) -> Options:
        return Options("They went to the moun", ("tains of snow", "t of all men", "d and back"), 0)


def test_a_choice_that_merges_with_its_context(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """Scored from where the context alone would end, as lm-evaluation-harness does it."""
    task = Task(name="halves", title="Halves", kind=Halves(), files="halves")
    data = TaskData(task, make_questions(1), [], "made up")
    (question,) = ask(tiny_tokenizer, data, LIKELY).questions
    assert any(skipped for _, skipped in question.choices)
    run = evaluate(tiny_olmoe, tiny_tokenizer, data, ZeroShot(), LIKELY, folder=tmp_path / "run")
    options = Halves().options({})
    start = len(tiny_tokenizer(options.context)["input_ids"])
    expected = []
    for text in options.continuations:
        ids = torch.tensor([tiny_tokenizer(options.context + text)["input_ids"]])
        with torch.no_grad():
            chances = tiny_olmoe(ids, use_cache=False).logits[0, :-1].float().log_softmax(dim=-1)
        likely = chances.gather(1, ids[0, 1:, None]).squeeze(1)
        expected.append(likely[start - 1 :].sum().item())
    assert run.samples[0].likelihoods == pytest.approx(expected, abs=1e-3)


def test_a_choice_of_nothing_is_told(tiny_tokenizer: Any, quiz: TaskData) -> None:
    class Empty(Choice):
        def options(self, row: Any) -> Options:
            return Options("Question:", ("", " x"), 1)

    task = Task(name="empty", title="Empty", kind=Empty(), files="empty")
    with pytest.raises(TaskDataError, match="Row 0-0 of empty has a choice of no tokens"):
        ask(tiny_tokenizer, TaskData(task, quiz.test, [], ""), LIKELY)


def test_other_choices_are_another_question(tiny_tokenizer: Any, quiz: TaskData) -> None:
    row = quiz.test[0]
    hashes = set()
    for other in (row, {**row, "choices": [*row["choices"][:-1], "x"]}, {**row, "answer": 1}):
        data = TaskData(quiz.task, [other], [], "")
        for scoring in ("likelihood", "generation"):
            hashes.add(ask(tiny_tokenizer, data, EvalConfig(scoring=scoring)).questions[0].hash)
    assert len(hashes) == 6


def test_a_model_that_gives_no_numbers_is_told(
    tiny_tokenizer: Any, quiz: TaskData, tmp_path: Path
) -> None:
    broken = AutoModelForCausalLM.from_pretrained(embedded_model("tiny-olmoe")).float().eval()
    torch.nn.init.constant_(broken.lm_head.weight, float("nan"))
    with pytest.raises(ModelError, match="gives no number for question"):
        evaluate(broken, tiny_tokenizer, quiz, ZeroShot(), LIKELY, folder=tmp_path / "run")


def test_what_a_memory_remembers_is_what_will_be_asked(tiny_tokenizer: Any, quiz: TaskData) -> None:
    row = quiz.reference[0]
    right = f" {row['choices'][row['answer']]}"
    (example,) = reference_examples(
        tiny_tokenizer, quiz, "likelihood", reference_rows(quiz, limit=1, seed=1)
    )
    assert example.prompt.startswith("Question: Question number")
    examples = reference_examples(tiny_tokenizer, quiz, "likelihood")
    assert examples[0] == Example(f"Question: {row['question']}\nAnswer:", right)
    spoken = reference_examples(tiny_tokenizer, quiz, "generation")[0]
    letter = "ABCDE"[row["answer"]]
    text = spoken.completion or str(spoken.messages)
    assert f"The correct answer is ({letter})." in text
    with pytest.raises(TaskDataError, match="has no reference set here: give a memory"):
        reference_examples(tiny_tokenizer, TaskData(quiz.task, quiz.test, [], ""), "likelihood")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"scoring": "guess"}, "Unknown scoring 'guess'. Available: generation"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"length": 1}, "length must be at least 2"),
    ],
)
def test_settings_out_of_range_are_told(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EvalConfig(**wrong)


def test_a_scoring_that_a_task_does_not_have(quiz: TaskData) -> None:
    with pytest.raises(
        ConfigError, match="quiz is scored by generation or likelihood, not by text"
    ):
        EvalConfig(scoring="text").scoring_of(quiz)


def test_nothing_of_a_secret_task_is_written(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    task = Task(name="hush", title="Hush", kind=Choice(), files="hush", secret=True)
    data = TaskData(task, make_questions(3), [], "made up")
    config = EvalConfig(scoring="generation", max_new_tokens=4)
    run = evaluate(tiny_olmoe, tiny_tokenizer, data, ZeroShot(), config, folder=tmp_path / "hush")
    evaluate(tiny_olmoe, tiny_tokenizer, data, ZeroShot(), LIKELY, folder=tmp_path / "likely")
    written = "".join(path.read_text(encoding="utf8") for path in tmp_path.rglob("*.json*"))
    page = render_runs([run], "zero-shot", resamples=10)
    for row in data.test:
        for text in (row["question"], *row["choices"]):
            assert text not in written
            assert text not in page
    assert "output" not in written


def test_where_there_is_a_chat_template_it_is_spoken(tiny_tokenizer: Any, quiz: TaskData) -> None:
    chatty = copy.deepcopy(tiny_tokenizer)
    chatty.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    asked = ask(chatty, quiz, EvalConfig(scoring="generation")).questions[0]
    text = chatty.decode(asked.ids)
    assert text.startswith("<user>What is the correct answer to this question:")
    assert text.endswith("(X).</user><assistant>")
    example = reference_examples(chatty, quiz, "generation")[0]
    assert example.messages is not None
    assert [message["role"] for message in example.messages] == ["user", "assistant"]
    plain = ask(chatty, quiz, LIKELY).questions[0]  # a choice is no conversation
    assert chatty.decode(plain.ids).startswith("Question:")
