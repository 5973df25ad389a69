"""Runs side by side: scores with intervals, and paired differences from a named method.

The same questions must have been asked: runs of one task are matched by their samples' ids and
prompts. Knows samples and statistics; nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any, Final

from knn_moe.errors import RunError
from knn_moe.evaluation.store import Run
from knn_moe.support.statistics import (
    Accuracy,
    Comparison,
    accuracy,
    by_tercile,
    holm,
    paired_bootstrap,
    pooled,
)
from knn_moe.tasks.sample import Sample
from knn_moe.tasks.task import TEXT

AVERAGE: Final = "Avg."
TERCILES: Final = ("low", "mid", "high")
_NLL, _ANSWER_LOSS = attrgetter("nll"), attrgetter("answer_loss")
_ALIKE: Final = ("model", "dtype", "scoring", "asked", "batches")  # of runs that are compared


@dataclass(frozen=True, kw_only=True)
class Line:
    """One method on one task. `change` and what follows: against the method named."""

    task: str
    title: str
    method: str
    scoring: str
    items: int
    score: Accuracy
    nll: float | None  # mean loss a token, of prompts or of texts
    unparsed: int  # outputs in which no answer was found
    near_ties: int  # choices that rounding may turn
    change: Comparison | None = None
    nll_change: Comparison | None = None
    adjusted_p: float | None = None  # of `change`, for as many tasks as were tested (Holm)
    by_perplexity: Mapping[str, Comparison] | None = None  # change in each third of the questions
    answer_loss: float | None = None  # by likelihood: of the right choice, in nats
    answer_change: Comparison | None = None
    preparation_seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_runs(runs: Sequence[Run], against: str, resamples: int = 10_000) -> list[Line]:
    """A line for each run, task by task; then the average over all questions of all tasks."""
    if against not in {run.method for run in runs}:
        found = ", ".join(sorted({run.method for run in runs}))
        raise RunError(f"There is no run of {against!r} to compare with. There are: {found}.")
    by_task: dict[str, dict[str, Run]] = {}
    for run in runs:
        if run.method in by_task.setdefault(run.task, {}):
            raise RunError(
                f"There are two runs of {run.method} on {run.task}: compare one folder of runs."
            )
        by_task[run.task][run.method] = run
    lines = []
    for methods in by_task.values():
        base = methods.get(against)
        ordered = sorted(methods.values(), key=lambda run: run.method != against)
        lines += [_line(run, base, resamples) for run in ordered]
    lines = _adjusted(lines, against)
    return [*lines, *_averages(by_task, against, resamples)]


def _line(run: Run, base: Run | None, resamples: int) -> Line:
    samples = run.samples
    line = Line(
        task=run.task,
        title=str(run.facts["title"]),
        method=run.method,
        scoring=str(run.facts["scoring"]),
        items=len(samples),
        score=_score(samples),
        nll=_mean([sample.nll for sample in samples]),
        unparsed=sum(sample.parsed is None for sample in samples if run.facts["scoring"] != TEXT),
        near_ties=sum(sample.near_tie for sample in samples),
        answer_loss=_mean([sample.answer_loss for sample in samples]),
        preparation_seconds=run.facts.get("preparation_seconds"),
    )
    if base is None or base is run:
        return line
    pairs = matched(run, base)
    ours, theirs = ([pair[side].score for pair in pairs] for side in (0, 1))
    return replace(
        line,
        change=paired_bootstrap(ours, theirs, resamples),
        nll_change=None if _reworded(run, base) else _changed(_NLL, pairs, resamples),
        by_perplexity=_thirds(pairs, resamples),
        answer_change=_changed(_ANSWER_LOSS, pairs, resamples),
    )


def matched(run: Run, base: Run) -> list[tuple[Sample, Sample]]:
    """Samples of the same questions, in the order of the base's."""
    ours = {sample.id: sample for sample in run.samples}
    theirs = {sample.id: sample for sample in base.samples}
    if ours.keys() != theirs.keys() or any(ours[n].prompt != theirs[n].prompt for n in theirs):
        raise RunError(
            f"{run.method} and {base.method} were not asked the same questions of {run.task}: "
            f"evaluate both with the same --limit, --seed, --scoring and data."
        )
    for fact in _ALIKE:
        if fact == "batches" and _reworded(run, base):
            continue  # prompts of other lengths go in batches of their own
        if run.facts.get(fact) != base.facts.get(fact):
            raise RunError(
                f"{run.method} and {base.method} differ in {fact} on {run.task}, which would be "
                f"taken for a gain: evaluate both the same way."
            )
    return [(ours[name], theirs[name]) for name in sorted(theirs)]


def _reworded(run: Run, base: Run) -> bool:
    """Whether one of them asked in other words, whose losses are of other tokens."""
    return bool(run.facts.get("reworded") or base.facts.get("reworded"))


def _changed(
    loss: Callable[[Sample], float | None],
    pairs: Sequence[tuple[Sample, Sample]],
    resamples: int,
) -> Comparison | None:
    """Of the samples that have this loss, on both sides."""
    both = [(loss(ours), loss(theirs)) for ours, theirs in pairs]
    known = [(one, other) for one, other in both if one is not None and other is not None]
    if not known:
        return None
    ours, theirs = zip(*known, strict=True)
    return paired_bootstrap(ours, theirs, resamples)


def _thirds(
    pairs: Sequence[tuple[Sample, Sample]], resamples: int
) -> Mapping[str, Comparison] | None:
    """The gain by the base's perplexity, as the paper groups it."""
    losses = [base.nll for _, base in pairs]
    if len(pairs) < len(TERCILES) or any(loss is None for loss in losses):
        return None
    perplexity = [math.exp(min(loss, 700.0)) for loss in losses if loss is not None]
    ours, theirs = ([pair[side].score for pair in pairs] for side in (0, 1))
    found = by_tercile(perplexity, ours, theirs, resamples)
    return dict(zip(TERCILES, found, strict=True))


def _adjusted(lines: Sequence[Line], against: str) -> list[Line]:
    """p-values for as many tasks as a method was tested on: some come out small by chance."""
    adjusted: dict[tuple[str, str], float] = {}
    for method in {line.method for line in lines} - {against}:
        tested = {line.task: line for line in lines if line.method == method}
        p_values = {name: line.change.p for name, line in tested.items() if line.change}
        for name, p in holm(p_values).items() if p_values else ():
            adjusted[name, method] = p
    return [replace(line, adjusted_p=adjusted.get((line.task, line.method))) for line in lines]


def _averages(by_task: Mapping[str, Mapping[str, Run]], against: str, resamples: int) -> list[Line]:
    """Over all questions together, as in the paper; of the tasks that have right and wrong."""
    asked = {
        name: methods
        for name, methods in by_task.items()
        if next(iter(methods.values())).facts["scoring"] != TEXT
    }
    if len(asked) < 2:
        return []
    shared = set.intersection(*(set(methods) for methods in asked.values()))
    if against not in shared:
        return []
    lines = []
    for method in sorted(shared, key=lambda name: (name != against, name)):
        samples = [sample for methods in asked.values() for sample in methods[method].samples]
        line = Line(
            task=AVERAGE,
            title=f"all {len(samples):,} questions",
            method=method,
            scoring=" and ".join(sorted({str(m[method].facts["scoring"]) for m in asked.values()})),
            items=len(samples),
            score=_score(samples),
            nll=_mean([sample.nll for sample in samples]),
            unparsed=sum(sample.parsed is None for sample in samples),
            near_ties=sum(sample.near_tie for sample in samples),
        )
        if method != against:
            parts = {
                name: tuple(
                    [pair[side].score for pair in matched(methods[method], methods[against])]
                    for side in (0, 1)
                )
                for name, methods in asked.items()
            }
            line = replace(line, change=pooled(parts, resamples))  # type: ignore[arg-type]
        lines.append(line)
    return lines


def _score(samples: Sequence[Sample]) -> Accuracy:
    """One sample that is neither right nor wrong says nothing of its spread."""
    scores = [sample.score for sample in samples]
    if len(scores) == 1 and scores[0] not in (0.0, 1.0):
        return Accuracy(scores[0], 0.0, 1.0, 1)
    return accuracy(scores)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
