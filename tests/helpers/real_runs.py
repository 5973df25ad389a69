"""Real runs of the embedded model: questions by likelihood and by generation, and text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.large_steps import build_with_large_steps
from helpers.quiz import make_questions
from knn_moe.adapt.controls import control
from knn_moe.evaluation.evaluate import EvalConfig, evaluate
from knn_moe.methods import KnnMoe, ZeroShot
from knn_moe.tasks import Choice, Task, TaskData, Text
from knn_moe.tasks.reference_set import reference_examples

METHODS = ("zero-shot", "knn", "knn-calibrated-shuffled")
HOSTILE: dict[str, Any] = {
    "id": "hostile<i>",
    "question": "</script><script>alert(1)</script><!-- Which of these & “those” é 漢?",
    "choices": ["<b onclick='x'>one</b>", "=2+2", "-3"],
    "answer": 0,
}
LONG: dict[str, Any] = {
    "id": "long",
    "question": "word " * 300 + "?",
    "choices": ["a very long choice " * 12, "unbroken" * 40],
    "answer": 1,
}
TEXT = "def add(first, second):\n    return first + second\n\n\n" * 12


def make_real_runs(model: Any, tokenizer: Any, folder: Path) -> Path:
    """Evaluate METHODS on the tasks "quiz", "asked" and "code", and return the folder of runs."""
    rows = [HOSTILE, LONG, *make_questions(22)]
    quiz = _data("quiz", Choice(), rows, make_questions(4, seed=1))
    asked = _data("asked", Choice(), [HOSTILE, *make_questions(4, seed=2)])
    code = _data("code", Text(), [{"text": TEXT}])
    examples = reference_examples(tokenizer, quiz, "likelihood")
    memory = build_with_large_steps(model, tokenizer, examples)
    shuffled = control(memory, "shuffled", model)
    methods = (ZeroShot(), KnnMoe(memory, name=METHODS[1]), KnnMoe(shuffled, name=METHODS[2]))
    for data, config in (
        (quiz, EvalConfig(scoring="likelihood", batch_size=8)),
        (asked, EvalConfig(scoring="generation", max_new_tokens=8)),
        (code, EvalConfig(length=64, limit=4)),
    ):
        for method in methods:
            place = folder / data.task.name / method.name
            evaluate(model, tokenizer, data, method, config, folder=place)
    return folder


def _data(name: str, kind: Any, test: list[Any], reference: list[Any] | None = None) -> TaskData:
    task = Task(name=name, title=name.title(), kind=kind, files=name)
    return TaskData(task, test, reference or [], "made up")
