"""Evaluation gives the numbers of a plain loop, always the same ones, also if it is resumed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel

from helpers.large_steps import build_with_large_steps
from helpers.quiz import WORDS, make_questions, make_quiz
from knn_moe import Example
from knn_moe.errors import ConfigError, ModelError, RunError, TaskDataError
from knn_moe.evaluation.compare import match_samples
from knn_moe.evaluation.evaluate import EvalConfig, evaluate, prepare_questions
from knn_moe.evaluation.store import Run, read_asked, read_run, read_runs
from knn_moe.methods import KnnMoe, Method, ZeroShot
from knn_moe.report.runs import render_runs
from knn_moe.support.progress import Progress
from knn_moe.tasks import Choice, Number, Task, TaskData, Text
from knn_moe.tasks.questions import batch_by_length, batch_by_tokens, draw_rows, encode_prompt
from knn_moe.tasks.reference_set import reference_examples, reference_rows
from knn_moe.tasks.task import Options

LIKELY = EvalConfig(scoring="likelihood", batch_size=3)
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
Evaluate: TypeAlias = Callable[..., Run]


@pytest.fixture(scope="module")
def quiz() -> TaskData:
    return make_quiz(test=8, reference=4)


@pytest.fixture(scope="module")
def knn(tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, quiz: TaskData) -> KnnMoe:
    examples = reference_examples(tiny_tokenizer, quiz, "likelihood")
    return KnnMoe(build_with_large_steps(tiny_olmoe, tiny_tokenizer, examples))


@pytest.fixture
def evaluate_in(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, quiz: TaskData, tmp_path: Path
) -> Evaluate:
    """Evaluate the embedded model and keep the run in the folder of that name."""

    def run(
        name: str,
        method: Method | None = None,
        config: EvalConfig = LIKELY,
        data: TaskData = quiz,
        **options: Any,
    ) -> Run:
        method = method or ZeroShot()
        folder = tmp_path / name
        return evaluate(tiny_olmoe, tiny_tokenizer, data, method, config, folder=folder, **options)

    return run


@torch.no_grad()
def plain_likelihoods(model: PreTrainedModel, tokenizer: Any, options: Options) -> list[float]:
    """Read each choice whole, one after the other, without cache, padding or batches."""
    start = len(tokenizer(options.context)["input_ids"])
    likelihoods = []
    for text in options.continuations:
        ids = torch.tensor([tokenizer(options.context + text)["input_ids"]])
        log = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(dim=-1)
        likelihoods.append(log.gather(1, ids[0, 1:, None])[start - 1 :].sum().item())
    return likelihoods


@pytest.mark.slow
@pytest.mark.parametrize("with_memory", [False, True])
def test_likelihoods_equal_those_of_a_plain_loop(
    with_memory: bool,
    evaluate_in: Evaluate,
    tiny_olmoe: PreTrainedModel,
    tiny_tokenizer: Any,
    quiz: TaskData,
    knn: KnnMoe,
) -> None:
    method: Method = knn if with_memory else ZeroShot()
    samples = {sample.id: sample for sample in evaluate_in("run", method).samples}
    assert len(samples) == 8
    with method.apply_to(tiny_olmoe):
        for row in quiz.test:
            options = quiz.task.kind.options(row)
            expected = plain_likelihoods(tiny_olmoe, tiny_tokenizer, options)
            sample = samples[row["id"]]
            assert sample.likelihoods == pytest.approx(expected, abs=2e-3)
            even = [a / len(b) for a, b in zip(expected, row["choices"], strict=True)]
            first, second = sorted(even, reverse=True)[:2]
            assert sample.margin == pytest.approx(first - second, abs=1e-3)
            if not sample.near_tie:
                assert sample.parsed == "ABCDE"[even.index(max(even))]
            assert sample.score == (sample.parsed == "ABCDE"[row["answer"]])


@pytest.mark.slow
def test_a_memory_changes_the_answers_and_leaves_nothing_behind(
    evaluate_in: Evaluate, tiny_olmoe: PreTrainedModel, knn: KnnMoe, tmp_path: Path
) -> None:
    with_load = EvalConfig(scoring="likelihood", batch_size=3, load=True)
    runs = [
        evaluate_in(name, method, with_load)
        for name, method in (("base", ZeroShot()), ("knn", knn), ("again", ZeroShot()))
    ]
    base, again = ((tmp_path / name / "samples.jsonl").read_bytes() for name in ("base", "again"))
    assert base == again
    pairs = match_samples(runs[1], runs[0])
    assert all(ours.likelihoods != theirs.likelihoods for ours, theirs in pairs)
    losses = [run.facts["load_balancing_loss"] for run in runs]
    top = tiny_olmoe.config.num_experts_per_tok
    assert all(top * 0.9 < loss < 3 * top for loss in losses)
    assert losses[0] == losses[2] != losses[1]


class KilledError(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("torn", [False, True])
def test_a_killed_run_resumes_to_the_same_result(
    torn: bool, evaluate_in: Evaluate, tmp_path: Path
) -> None:
    whole = evaluate_in("whole")

    def kill(progress: Progress) -> None:
        if progress.done > progress.total // 2:
            raise KilledError

    with pytest.raises(KilledError):
        evaluate_in("killed", on_progress=kill)
    samples = tmp_path / "killed" / "samples.jsonl"
    assert 0 < len(read_run(tmp_path / "killed").samples) < 8
    if torn:  # in the middle of a batch, of a line, and of a character
        samples.write_bytes(samples.read_bytes()[:-40] + "é".encode()[:1])
    with pytest.raises(RunError, match="Not finished: quiz/zero-shot"):
        read_runs(tmp_path)
    resumed = evaluate_in("killed", resume=True)
    by_id = {sample.id: sample for sample in resumed.samples}
    assert by_id == {sample.id: sample for sample in whole.samples}
    assert len(samples.read_text(encoding="utf8").splitlines()) == len(by_id) == 8


def test_an_existing_run_is_neither_overwritten_nor_resumed_with_another_config(
    evaluate_in: Evaluate, tmp_path: Path
) -> None:
    small, other = (EvalConfig(scoring="likelihood", limit=limit) for limit in (1, 2))
    evaluate_in("run", config=small)
    with pytest.raises(RunError, match="with --resume, or replace it with --overwrite"):
        evaluate_in("run", config=small)
    with pytest.raises(RunError, match=r"This run cannot be resumed: settings was .* and is .*"):
        evaluate_in("run", config=other, resume=True)
    facts = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf8"))
    old = {**facts, "note": "other words", "versions": {}, "device": "cuda:0"}
    (tmp_path / "run" / "run.json").write_text(json.dumps(old), encoding="utf8")
    assert len(evaluate_in("run", config=small, resume=True).samples) == 1
    assert len(evaluate_in("run", config=other, overwrite=True).samples) == 2


@pytest.mark.slow
def test_generated_answers_are_those_of_each_prompt_alone(
    evaluate_in: Evaluate, tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    rows = [{"question": f"What is {number} + 1? {'Well? ' * number}", "answer": str(number + 1)}
            for number in range(4)]  # fmt: skip
    task = Task(name="sums", title="Sums", kind=Number(), files="sums")
    config = EvalConfig(batch_size=3, max_new_tokens=6)
    run = evaluate_in("run", config=config, data=TaskData(task, rows, [], "made up"))
    for sample in run.samples:
        row = rows[int(sample.id)]
        ids = torch.tensor([encode_prompt(tiny_tokenizer, task.kind.prompt(row))])
        written = tiny_olmoe.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        alone = tiny_tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
        assert sample.output == alone
        assert sample.score == task.kind.judge(alone, row).score
        with torch.no_grad():
            loss = tiny_olmoe(ids, labels=ids).loss
        assert sample.nll == pytest.approx(loss.item(), abs=1e-4)


def test_text_is_scored_by_windows(
    evaluate_in: Evaluate, tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    task = Task(name="words", title="Words", kind=Text(), files="words")
    texts = [{"text": " ".join(WORDS * 4)}, {"text": " ".join(reversed(WORDS * 3))}]
    data = TaskData(task, texts, [], "made up")
    run = evaluate_in("run", config=EvalConfig(length=32, batch_size=2), data=data)
    ids = [token for row in texts for token in tiny_tokenizer(row["text"])["input_ids"]]
    assert len(run.samples) == len(ids) // 32
    window = torch.tensor([ids[32:64]])
    with torch.no_grad():
        output = tiny_olmoe(window, labels=window)
    sample = next(sample for sample in run.samples if sample.id == "window-1")
    assert sample.nll == pytest.approx(output.loss.item(), abs=1e-4)
    likeliest = output.logits[0, :-1].argmax(dim=-1)
    assert sample.score == pytest.approx((likeliest == window[0, 1:]).float().mean().item())
    with pytest.raises(TaskDataError, match="tokens, fewer than a window of 100000"):
        prepare_questions(tiny_tokenizer, data, EvalConfig(length=100000))


def test_a_run_keeps_what_was_asked(
    evaluate_in: Evaluate, tiny_tokenizer: Any, quiz: TaskData
) -> None:
    few = EvalConfig(scoring="likelihood", limit=2)
    run = evaluate_in("likelihood", config=few)
    asked = read_asked(run)
    rows = {row["id"]: row for row in quiz.test}
    assert asked.keys() == {sample.id for sample in run.samples}
    for name, one in asked.items():
        assert one.prompt == f"Question: {rows[name]['question']}\nAnswer:"
        assert list(one.choices) == [f" {choice}" for choice in rows[name]["choices"]]
    few = replace(few, scoring="generation", max_new_tokens=1)
    generated = read_asked(evaluate_in("generation", config=few))
    assert {name: one.prompt for name, one in generated.items()} == {
        name: quiz.task.kind.prompt(rows[name]) for name in asked
    }
    words = Task(name="words", title="Words", kind=Text(), files="words")
    text = " ".join(WORDS * 4)
    few = EvalConfig(length=32, limit=1)
    data = TaskData(words, [{"text": text}], [], "made up")
    (window,) = read_asked(evaluate_in("text", config=few, data=data)).values()
    assert window.prompt in text


def test_of_a_secret_task_no_question_is_kept(
    evaluate_in: Evaluate, quiz: TaskData, tmp_path: Path
) -> None:
    few = EvalConfig(scoring="generation", limit=2, max_new_tokens=2)
    secret = replace(quiz, task=replace(quiz.task, secret=True))
    evaluate_in("run", config=few, data=quiz)
    run = evaluate_in("run", config=few, data=secret, overwrite=True)
    assert read_asked(run) == {}
    files = sorted((tmp_path / "run").iterdir())
    assert [file.name for file in files] == ["run.json", "samples.jsonl"]
    written = "".join(file.read_text(encoding="utf8") for file in files)
    assert not any(row["question"] in written for row in quiz.test)


def test_questions_and_batches_are_always_the_same(tiny_tokenizer: Any) -> None:
    quiz = make_quiz()
    few = draw_rows(quiz, 5, seed=3)
    assert few == draw_rows(quiz, 5, seed=3)
    assert few != draw_rows(quiz, 5, seed=4)
    asked = prepare_questions(tiny_tokenizer, quiz, LIKELY)
    ids = [question.id for batch in asked.batches for question in batch]
    assert sorted(ids) == sorted(question.id for question in asked.questions)
    lengths = [{len(question.ids) for question in batch} for batch in asked.batches]
    assert max(map(len, asked.batches)) == 3
    assert all(len(each) == 1 for each in lengths)
    assert lengths == sorted(lengths, key=min)
    assert max(map(len, batch_by_length(asked.questions, 7, one_length=False))) == 7


@pytest.mark.slow
def test_batches_by_tokens_give_the_same_answers(
    evaluate_in: Evaluate, knn: KnnMoe, tiny_tokenizer: Any
) -> None:
    by_tokens = EvalConfig(scoring="likelihood", batch_tokens=400, prompt_losses=False)
    asked = prepare_questions(tiny_tokenizer, make_quiz(), by_tokens)
    assert 1 < len(asked.batches) < len(asked.questions)
    assert any(len({len(each.ids) for each in batch}) > 1 for batch in asked.batches)
    for batch in asked.batches:
        longest = max(len(question.ids) for question in batch)
        choices = sum(len(ids) for question in batch for ids, _ in question.choices)
        assert longest * len(batch) + choices <= 400
    for method in (ZeroShot(), knn):
        runs = [
            evaluate_in(f"{method.name}-{n}", method, x) for n, x in enumerate((LIKELY, by_tokens))
        ]
        plain, fast = ({sample.id: sample for sample in run.samples} for run in runs)
        assert plain.keys() == fast.keys()
        for name, sample in fast.items():
            assert sample.likelihoods == pytest.approx(plain[name].likelihoods, abs=1e-4)
            assert (sample.nll, plain[name].nll is None) == (None, False)
    (single,) = batch_by_tokens(asked.questions[:1], 1)
    assert single == [0]


def test_an_end_token_that_the_tokenizer_appends_is_dropped(
    tiny_tokenizer: Any, quiz: TaskData
) -> None:
    ending = copy.deepcopy(tiny_tokenizer)
    end = ending.eos_token
    ending.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, ending.eos_token_id)]
    )
    assert ending("word")["input_ids"][-1] == ending.eos_token_id
    plain, ended = (
        [question.choices for question in prepare_questions(each, quiz, LIKELY).questions]
        for each in (tiny_tokenizer, ending)
    )
    assert ended == plain
    assert encode_prompt(ending, "word") == encode_prompt(tiny_tokenizer, "word")


def test_questions_longer_than_the_model_reads_are_refused(
    evaluate_in: Evaluate, tmp_path: Path
) -> None:
    row = {**make_questions(1)[0], "question": "word " * 3000}
    data = TaskData(Task(name="long", title="Long", kind=Choice(), files="long"), [row], [], "")
    with pytest.raises(TaskDataError, match=r"1 questions of long are longer than the .*0-0"):
        evaluate_in("run", data=data)
    assert not (tmp_path / "run").exists()


class Halves(Choice):
    """Words cut in two: a choice changes how the end of its context is tokenised."""

    def options(self, row: Any) -> Options:
        return Options("They went to the moun", ("tains of snow", "t of all men", "d and back"), 0)


def test_a_choice_that_merges_with_its_context(
    evaluate_in: Evaluate, tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    """It is scored from where the context alone would end, as lm-evaluation-harness does."""
    task = Task(name="halves", title="Halves", kind=Halves(), files="halves")
    data = TaskData(task, make_questions(1), [], "made up")
    (question,) = prepare_questions(tiny_tokenizer, data, LIKELY).questions
    assert any(skipped for _, skipped in question.choices)
    run = evaluate_in("run", data=data)
    expected = plain_likelihoods(tiny_olmoe, tiny_tokenizer, Halves().options({}))
    assert run.samples[0].likelihoods == pytest.approx(expected, abs=1e-3)


def test_a_choice_without_tokens_is_refused(tiny_tokenizer: Any, quiz: TaskData) -> None:
    class Empty(Choice):
        def options(self, row: Any) -> Options:
            return Options("Question:", ("", " x"), 1)

    task = Task(name="empty", title="Empty", kind=Empty(), files="empty")
    with pytest.raises(TaskDataError, match="Row 0-0 of empty has a choice or a context without"):
        prepare_questions(tiny_tokenizer, TaskData(task, quiz.test, [], ""), LIKELY)


def test_questions_with_other_choices_have_other_hashes(
    tiny_tokenizer: Any, quiz: TaskData
) -> None:
    row = quiz.test[0]
    hashes = set()
    for other in (row, {**row, "choices": [*row["choices"][:-1], "x"]}, {**row, "answer": 1}):
        data = TaskData(quiz.task, [other], [], "")
        for scoring in ("likelihood", "generation"):
            asked = prepare_questions(tiny_tokenizer, data, EvalConfig(scoring=scoring))
            hashes.add(asked.questions[0].hash)
    assert len(hashes) == 6


def test_logits_that_are_not_finite_are_an_error(
    evaluate_in: Evaluate, tiny_olmoe: PreTrainedModel
) -> None:
    broken = tiny_olmoe.lm_head.register_forward_hook(lambda *call: call[-1] * float("nan"))
    try:
        with pytest.raises(ModelError, match=r"logits for question .* are not finite"):
            evaluate_in("run")
    finally:
        broken.remove()


def test_examples_have_the_form_of_the_questions(tiny_tokenizer: Any, quiz: TaskData) -> None:
    row = quiz.reference[0]
    right = f" {row['choices'][row['answer']]}"
    drawn = reference_rows(quiz, limit=1, seed=1)
    (example,) = reference_examples(tiny_tokenizer, quiz, "likelihood", drawn)
    assert example.prompt.startswith("Question: Question number")
    examples = reference_examples(tiny_tokenizer, quiz, "likelihood")
    wrong = tuple(f" {choice}" for n, choice in enumerate(row["choices"]) if n != row["answer"])
    prompt = f"Question: {row['question']}\nAnswer:"
    assert examples[0] == Example(prompt, right, distractors=wrong)
    spoken = reference_examples(tiny_tokenizer, quiz, "generation")[0]
    assert f"The correct answer is ({'ABCDE'[row['answer']]})." in spoken.completion
    with pytest.raises(TaskDataError, match=r"quiz has no reference set in 'x'. .*--memory FOLDER"):
        reference_examples(tiny_tokenizer, TaskData(quiz.task, quiz.test, [], "x"), "likelihood")


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"scoring": "likelyhood"}, r"Unknown scoring 'likelyhood'. Did you mean 'likelihood'\?"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"length": 1}, "length must be at least 2"),
    ],
)
def test_a_config_out_of_range_is_refused(wrong: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        EvalConfig(**wrong)


def test_a_scoring_that_the_task_does_not_support_is_refused(
    quiz: TaskData, tiny_tokenizer: Any
) -> None:
    with pytest.raises(ConfigError, match="quiz is scored by generation or likelihood, not by te"):
        EvalConfig(scoring="text").scoring_for(quiz, tiny_tokenizer)


def test_without_a_chat_template_choices_are_scored_by_likelihood(
    quiz: TaskData, tiny_tokenizer: Any, evaluate_in: Evaluate
) -> None:
    chatty = copy.deepcopy(tiny_tokenizer)
    chatty.chat_template = CHAT
    sums = replace(quiz, task=replace(quiz.task, kind=Number()))
    for scoring, tokenizer, data, expected in (
        (None, chatty, quiz, "generation"),
        (None, tiny_tokenizer, quiz, "likelihood"),
        ("generation", tiny_tokenizer, quiz, "generation"),
        ("likelihood", chatty, quiz, "likelihood"),
        (None, tiny_tokenizer, sums, "generation"),  # there is nothing to choose from
    ):
        assert EvalConfig(scoring=scoring).scoring_for(data, tokenizer) == expected
    run = evaluate_in("run", config=EvalConfig(limit=2))
    assert run.facts["scoring"] == "likelihood"
    assert run.facts["note"].endswith("by likelihood, because the model has no chat template.")
    assert "chat template" not in evaluate_in("told", config=LIKELY).facts["note"]


def test_a_generated_answer_knows_its_number_of_choices(
    evaluate_in: Evaluate, quiz: TaskData
) -> None:
    config = EvalConfig(scoring="generation", limit=3, max_new_tokens=2)
    for sample in evaluate_in("run", config=config).samples:
        row = next(row for row in quiz.test if row["id"] == sample.id)
        assert sample.choices == len(row["choices"])
        assert sample.chance == 1 / len(row["choices"])


def test_nothing_of_a_secret_task_is_written(evaluate_in: Evaluate, tmp_path: Path) -> None:
    task = Task(name="hush", title="Hush", kind=Choice(), files="hush", secret=True)
    data = TaskData(task, make_questions(2), [], "made up")
    run = evaluate_in("hush", config=EvalConfig(scoring="generation", max_new_tokens=4), data=data)
    evaluate_in("likely", data=data)
    written = "".join(path.read_text(encoding="utf8") for path in tmp_path.rglob("*.json*"))
    page = render_runs([run], "zero-shot", resamples=10)
    for row in data.test:
        for text in (row["question"], *row["choices"]):
            assert text not in written
            assert text not in page
    assert "output" not in written


def test_a_chat_template_is_used_for_generation_only(tiny_tokenizer: Any, quiz: TaskData) -> None:
    chatty = copy.deepcopy(tiny_tokenizer)
    chatty.chat_template = CHAT
    generated, likely = (
        chatty.decode(prepare_questions(chatty, quiz, config).questions[0].ids)
        for config in (EvalConfig(scoring="generation"), LIKELY)
    )
    assert generated.startswith("<user>What is the correct answer to this question:")
    assert generated.endswith("(X).</user><assistant>")
    assert likely.startswith("Question:")
    example = reference_examples(chatty, quiz, "generation")[0]
    assert example.messages is not None
    assert [message["role"] for message in example.messages] == ["user", "assistant"]
