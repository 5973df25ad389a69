"""5-shot: the most similar solved questions in the paper's prompt, as many as fit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from helpers.unchanged import left_as_it_was
from knn_moe.evaluation.compare import match_samples
from knn_moe.evaluation.evaluate import EvalConfig, evaluate, prepare_questions
from knn_moe.methods import TaskContext, ZeroShot, prepare
from knn_moe.methods.embedding import VARIABLE, load_embedder
from knn_moe.methods.few_shot import FewShot
from knn_moe.tasks import Choice, Number, Task, TaskData
from knn_moe.tasks.kinds import Program
from knn_moe.tasks.questions import Question
from knn_moe.tasks.task import Kind, Row

TOPICS = ("capital of", "river of", "mountain of", "language of", "currency of", "flag of")
LANDS = ("France", "Peru", "Japan")
LIKELY = EvalConfig(scoring="likelihood", batch_size=4)


def rows() -> list[Row]:
    """Return a question for each topic and country, with two to four choices."""
    made = []
    for number, (topic, land) in enumerate((topic, land) for topic in TOPICS for land in LANDS):
        choices = [f"thing {number + place}" for place in range(2 + number % 3)]
        question = f"What is the {topic} {land}?"
        made.append({"question": question, "choices": choices, "answer": number % len(choices)})
    return made


def quiz(kind: Kind, test: list[Row], reference: list[Row]) -> TaskData:
    return TaskData(Task(name="quiz", title="Quiz", kind=kind, files="quiz"), test, reference, "")


def lands(kind: Kind | None = None) -> TaskData:
    made = rows()
    test = [row for row in made if "Peru" in row["question"]]
    return quiz(kind or Choice(), test, [row for row in made if row not in test])


def few_shot(model: Any, tokenizer: Any, data: TaskData, scoring: str) -> FewShot:
    method = prepare("5-shot", TaskContext(model, tokenizer, data, scoring)).method
    assert isinstance(method, FewShot)
    return method


def nearest(data: TaskData, row: Row) -> list[Row]:
    """Return the five most similar rows, the most similar last."""
    question, embed = data.task.kind.question, load_embedder()
    vectors = embed([question(each) for each in data.reference])
    cosines = (vectors @ embed([question(row)])[0]).tolist()
    order = sorted(range(len(cosines)), key=cosines.__getitem__)
    return [data.reference[place] for place in order[-5:]]


@pytest.mark.slow
def test_the_papers_prompt_with_the_most_similar_questions(
    tiny_olmoe: Any, tiny_tokenizer: Any
) -> None:
    data = lands()
    questions = prepare_questions(tiny_tokenizer, data, EvalConfig(scoring="generation")).questions
    made = few_shot(tiny_olmoe, tiny_tokenizer, data, "generation").reword(questions)
    for before, after in zip(questions, made, strict=True):
        shots = nearest(data, before.row)
        assert before.row["question"].replace("Peru", "") in [
            shot["question"].replace(land, "") for shot in shots for land in LANDS
        ]
        blocks = [
            "Here are some example expert multiple-choice questions. After the examples, answer "
            "the final question."
        ]
        for row in (*shots, before.row):
            listed = [f"({'ABCD'[place]}) {text}" for place, text in enumerate(row["choices"])]
            blocks.append("\n".join([f"Question: {row['question']}", "Choices:", *listed]))
            if row is not before.row:
                blocks[-1] += f"\nThe correct answer is ({'ABCD'[row['answer']]})"
        assert tiny_tokenizer.decode(after.ids) == "\n\n".join(blocks)
        assert (after.id, after.hash, after.row) == (before.id, before.hash, before.row)


@pytest.mark.slow
@pytest.mark.parametrize("bare", [False, True])
def test_prompts_by_likelihood_show_right_choices(
    bare: bool, tiny_olmoe: Any, tiny_tokenizer: Any
) -> None:
    data = lands(Choice(bare=bare))
    questions = prepare_questions(tiny_tokenizer, data, LIKELY).questions
    made = few_shot(tiny_olmoe, tiny_tokenizer, data, "likelihood").reword(questions)
    for before, after in zip(questions, made, strict=True):
        blocks = []
        for row in (*nearest(data, before.row), before.row):
            context = row["question"] if bare else f"Question: {row['question']}\nAnswer:"
            right = "" if row is before.row else f" {row['choices'][row['answer']]}"
            blocks.append(context + right)
        expected = "\n\n".join(blocks)
        for (ids, _), choice in zip(after.choices, before.row["choices"], strict=True):
            assert tiny_tokenizer.decode(after.ids + ids) == f"{expected} {choice}"
        assert (after.hash, after.options) == (before.hash, before.options)
        assert [skipped for _, skipped in after.choices] == [s for _, s in before.choices]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Number(max_new_tokens=8), {"solution": "We count them.", "answer": "3"}),
        (Program(max_new_tokens=8), {"code": "x = 1", "tests": ["assert x"]}),
    ],
    ids=["number", "program"],
)
def test_other_kinds_show_solved_prompts(
    kind: Kind, fields: Row, tiny_olmoe: Any, tiny_tokenizer: Any
) -> None:
    made = [
        {"question": row["question"], "prompt": f"Count: {row['question']}", **fields}
        for row in rows()[:8]
    ]
    data = quiz(kind, made[:1], made[1:])
    questions = prepare_questions(tiny_tokenizer, data, EvalConfig(scoring="generation")).questions
    (after,) = few_shot(tiny_olmoe, tiny_tokenizer, data, "generation").reword(questions)
    shots = nearest(data, made[0])
    blocks = [f"{kind.prompt(row)}\n{kind.completion(row)}" for row in shots]
    assert tiny_tokenizer.decode(after.ids) == "\n\n".join([*blocks, kind.prompt(made[0])])


@pytest.mark.slow
def test_a_run_can_be_compared_and_leaves_the_model_as_it_was(
    tiny_olmoe: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    data = lands()
    methods = ZeroShot(), few_shot(tiny_olmoe, tiny_tokenizer, data, "likelihood")
    with left_as_it_was(tiny_olmoe):
        alone, run = (
            evaluate(tiny_olmoe, tiny_tokenizer, data, each, LIKELY, folder=tmp_path / each.name)
            for each in methods
        )
    pairs = match_samples(run, alone)
    assert all(ours.likelihoods != theirs.likelihoods for ours, theirs in pairs)
    assert run.facts["reworded"]
    assert run.facts["method_facts"] == {
        "shots": 5,
        "order": "most similar last",
        "embedding": load_embedder().name,
        "reference": 12,
        "shortened": 0,
    }


@pytest.mark.parametrize(
    ("scoring", "written", "spare"), [("likelihood", 0, 15), ("generation", 8, 60)]
)
@pytest.mark.slow
def test_long_prompts_lose_their_least_similar_shots(
    scoring: str, written: int, spare: int, tiny_olmoe: Any, tiny_tokenizer: Any
) -> None:
    """One question keeps some of its shots; another fills the model by itself."""
    room = tiny_olmoe.config.max_position_embeddings - written
    kind = Choice(max_new_tokens=8)
    full = {"question": "word " * (room + written - spare), "choices": ["a", "b"], "answer": 0}
    reference = [{**row, "question": row["question"] + " very" * 250} for row in rows()[2:8]]
    data = quiz(kind, [rows()[0], full], reference)
    questions = prepare_questions(tiny_tokenizer, data, EvalConfig(scoring=scoring)).questions
    method = few_shot(tiny_olmoe, tiny_tokenizer, data, scoring)
    made = method.reword(questions)
    assert method.facts()["shortened"] == 2
    assert made[1] == questions[1]
    shots = nearest(data, questions[0].row)
    shown = [tiny_tokenizer.decode(made[0].ids).count(row["question"]) for row in shots]
    kept = sum(shown)
    assert 0 < kept < 5
    assert shown == [0] * (5 - kept) + [1] * kept
    fits = [
        _length(method._add_shots(questions[:1], [shots[-count:]])[0]) <= room
        for count in (kept, kept + 1)
    ]
    assert fits == [True, False]


def _length(question: Question) -> int:
    return len(question.ids) + max((len(ids) for ids, _ in question.choices), default=0)


def test_fewer_reference_questions_than_shots(tiny_olmoe: Any, tiny_tokenizer: Any) -> None:
    data = quiz(Choice(), rows()[:1], rows()[1:3])
    questions = prepare_questions(tiny_tokenizer, data, LIKELY).questions
    method = few_shot(tiny_olmoe, tiny_tokenizer, data, "likelihood")
    (made,) = method.reword(questions)
    assert tiny_tokenizer.decode(made.ids).count("Question:") == 3
    assert method.facts()["shortened"] == 0


def test_through_the_chat_template(tiny_olmoe: Any, tiny_tokenizer: Any) -> None:
    chatty = copy.deepcopy(tiny_tokenizer)
    chatty.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    data = lands()
    questions = prepare_questions(chatty, data, EvalConfig(scoring="generation")).questions
    text = chatty.decode(few_shot(tiny_olmoe, chatty, data, "generation").reword(questions)[0].ids)
    assert text.startswith("<user>Here are some example expert")
    assert text.endswith("</user><assistant>")
    assert text.count("The correct answer is (") == 5


def test_the_model_itself_can_embed_the_questions(
    tiny_olmoe: Any, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "own")
    data = quiz(Choice(), rows()[:1], rows()[1:4])
    assert few_shot(tiny_olmoe, tiny_tokenizer, data, "likelihood").facts()["embedding"] == "own"
