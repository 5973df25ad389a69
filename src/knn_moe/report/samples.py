"""The questions of runs with the answers of every method, as JSON for the viewer on a page.

Knows runs; nothing of HTML. A page holds so many questions as a browser is comfortable with.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from knn_moe.evaluation.store import Run, read_asked
from knn_moe.reference.choices import count_characters
from knn_moe.tasks.sample import Asked, Sample
from knn_moe.tasks.task import TEXT

MOST_BYTES: Final = 8_000_000  # of questions and answers on a page
MOST_CHARACTERS: Final = 6_000  # of a prompt or an output


@dataclass(frozen=True)
class ShownTask:
    """The questions of a task on a page.

    `note` says what is not shown and where it is; `data` is what the viewer reads.
    """

    task: str
    note: str
    data: Mapping[str, Any]


def show_samples(
    runs: Sequence[Run], against: str, most_bytes: int = MOST_BYTES
) -> list[ShownTask]:
    """Return the questions of each task.

    Where they are too many, those come first on which a method and the baseline score differently.

    Args:
        against: The baseline, which is shown first.
        most_bytes: Of all tasks together.
    """
    by_task: dict[str, list[Run]] = {}
    for run in runs:
        by_task.setdefault(run.task, []).append(run)
    shown: list[ShownTask] = []
    for left, own in enumerate(by_task.values()):
        ordered = sorted(own, key=lambda run: run.method != against)
        share = most_bytes // (len(by_task) - left)
        shown.append(_show_task(ordered, share))
        most_bytes -= len(json.dumps(shown[-1].data))
    return shown


def _show_task(runs: Sequence[Run], most_bytes: int) -> ShownTask:
    first = runs[0]
    asked = next((known for run in runs if (known := read_asked(run))), {})
    answers = [{sample.id: sample for sample in run.samples} for run in runs]
    ids = [name for name in _in_order(answers[0], asked) if all(name in one for one in answers)]
    changed = {
        name
        for name in ids
        if len({(one[name].score, one[name].parsed) for one in answers}) > 1
        and first.facts["scoring"] != TEXT
    }
    left = most_bytes
    kept: dict[str, dict[str, Any]] = {}
    for name in sorted(ids, key=lambda name: name not in changed):
        row = _question(name, asked.get(name), [one[name] for one in answers])
        left -= len(json.dumps(row))
        if left < 0 and kept:
            break
        kept[name] = row
    data = {
        "task": first.task,
        "scoring": first.facts["scoring"],
        "methods": [run.method for run in runs],
        "questions": [kept[name] for name in ids if name in kept],
    }
    return ShownTask(first.task, _explain(first, bool(asked), len(kept), len(ids)), data)


def _in_order(samples: Mapping[str, Sample], asked: Mapping[str, Asked]) -> list[str]:
    """Return the ids in the order of the questions; if that is unknown, by name and number."""
    if asked:
        return [name for name in asked if name in samples]

    def key(name: str) -> list[tuple[int, str]]:
        return [
            (int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)
        ]

    return sorted(samples, key=key)


def _question(name: str, asked: Asked | None, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return a question and its answers, without what is not known."""
    row: dict[str, Any] = {"id": name, "answers": [_answer(sample) for sample in samples]}
    answer = next((sample.answer for sample in samples if sample.answer is not None), None)
    if answer is not None:
        row["answer"] = _cut(answer)
    if asked is not None:
        row["prompt"] = _cut(asked.prompt)
        if asked.choices:
            row["choices"] = [_cut(choice.strip()) for choice in asked.choices]
            row["lengths"] = [count_characters(choice) for choice in asked.choices]
    return row


def _answer(sample: Sample) -> dict[str, Any]:
    likelihoods = sample.likelihoods
    values: dict[str, Any] = {
        "score": round(sample.score, 6),
        "parsed": None if sample.parsed is None else _cut(sample.parsed),
        "output": None if sample.output is None else _cut(sample.output),
        "likelihoods": likelihoods and [round(value, 3) for value in likelihoods],
        "nll": _number(sample.nll),
        "loss": _number(sample.answer_loss),
        "near_tie": sample.near_tie or None,
    }
    return {key: value for key, value in values.items() if value is not None}


def _number(value: float | None) -> float | str | None:
    """Return a number that JSON knows, and words for one that it does not."""
    if value is None or math.isfinite(value):
        return None if value is None else round(value, 4)
    return "not a number" if math.isnan(value) else "infinite"


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]} … (cut off here: {len(text):,} characters)"


def _explain(run: Run, has_texts: bool, kept: int, total: int) -> str:
    """Say what of a task is not on the page, and where it is."""
    said = []
    if run.facts.get("secret"):
        said.append(
            f"The authors of {run.facts['title']} ask that its questions are not published. Only "
            f"letters and scores are shown."
        )
    elif not has_texts:
        said.append(
            "This run keeps no prompts: an earlier version made it. Evaluate again with "
            "--overwrite to see them."
        )
    if kept < total:
        first = "" if run.facts["scoring"] == TEXT else ", those that a method changed first"
        said.append(
            f"{kept:,} of {total:,} are on this page{first}. All are in the folder of each run: "
            f"{run.task}/METHOD/samples.jsonl has the answers"
            + (", asked.jsonl.gz the questions." if has_texts else ".")
        )
    return " ".join(said)
