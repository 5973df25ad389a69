"""Compare runs: scores with intervals, and paired differences from one of the methods.

Runs of one task must have the same questions: samples are matched by their ids and prompts. A
change of the score is in doubt, and nobody may call it better or worse, if the baseline gave no
answer to most questions or if both scores are at chance. Knows runs, samples and statistics;
nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeAlias

from knn_moe.errors import RunError
from knn_moe.evaluation.comparison_table import comparison_table
from knn_moe.evaluation.store import Run, read_runs
from knn_moe.support.folders import expand_home
from knn_moe.support.statistics import (
    Accuracy,
    Comparison,
    DoubtedComparison,
    accuracy,
    by_tercile,
    holm,
    paired_bootstrap,
    pooled,
    split_terciles,
)
from knn_moe.tasks.sample import Sample
from knn_moe.tasks.task import GENERATION, TEXT

AVERAGE: Final = "Avg."
MOSTLY: Final = 0.5  # a baseline with a larger share of outputs without an answer is no baseline
TERCILES: Final = ("low", "mid", "high")
_NLL, _ANSWER_LOSS = attrgetter("nll"), attrgetter("answer_loss")
_MUST_AGREE: Final = ("model", "dtype", "scoring", "asked", "batches")  # in compared runs
Pairs: TypeAlias = Sequence[tuple[Sample, Sample]]  # a method's and the baseline's, by question


@dataclass(frozen=True, kw_only=True)
class Line:
    """The result of one method on one task; each `change` is against the baseline method."""

    task: str
    title: str
    method: str
    scoring: str
    items: int
    score: Accuracy
    nll: float | None  # mean loss per token, of prompts or of texts
    near_ties: int  # choices that rounding may flip
    chance: float | None = None  # the score of guessing; None: no choices, or not known
    unparsed: int | None = None  # outputs without an answer; None: nothing was generated
    unparsed_share: float | None = None  # of the outputs
    change: Comparison | None = None
    nll_change: Comparison | None = None
    adjusted_p: float | None = None  # of `change`, adjusted for the number of tasks (Holm)
    by_perplexity: Mapping[str, Comparison] | None = None  # `change` in each third of the questions
    answer_loss: float | None = None  # loss of the right choice in nats, if scored by likelihood
    answer_change: Comparison | None = None
    preparation_seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class ComparedRuns(list[Line]):
    """The lines of a comparison, which a notebook and `print` show as a table."""

    def __init__(self, lines: Iterable[Line], against: str) -> None:
        super().__init__(lines)
        self.against = against

    def __str__(self) -> str:
        return comparison_table(self, self.against, explain_doubts(self)).to_text()

    def _repr_html_(self) -> str:
        return comparison_table(self, self.against, explain_doubts(self)).to_html()


def compare_runs(
    runs: Sequence[Run] | str | Path, against: str, resamples: int = 10_000
) -> ComparedRuns:
    """Compare runs with a baseline.

    Args:
        runs: At most one for each task and method, or the folder that they are in.
        against: The method that is the baseline.
        resamples: Bootstrap resamples.

    Returns:
        A line for each run, task by task, then the averages over all questions of all tasks: a
        list, which a notebook and `print` show as a table.

    Raises:
        RunError: The baseline is missing, two runs cannot be compared, or there are none.
    """
    if isinstance(runs, str | Path):
        runs = read_runs(expand_home(runs))
    if against not in {run.method for run in runs}:
        methods = ", ".join(sorted({run.method for run in runs}))
        raise RunError(f"There is no run of {against!r} to compare with. Available: {methods}.")
    by_task: dict[str, dict[str, Run]] = {}
    for run in runs:
        if run.method in by_task.setdefault(run.task, {}):
            raise RunError(
                f"There are two runs of {run.method} on {run.task}. Compare one folder of runs."
            )
        by_task[run.task][run.method] = run
    lines: list[Line] = []
    for by_method in by_task.values():
        base = by_method.get(against)
        ordered = sorted(by_method.values(), key=lambda run: run.method != against)
        lines += [_compare(run, base, resamples) for run in ordered]
    averages = _average(by_task, against, resamples)
    return ComparedRuns([*_adjust_p_values(lines, against), *averages], against)


def _compare(run: Run, base: Run | None, resamples: int) -> Line:
    line = summarise(run)
    if base is None or base is run:
        return line
    pairs = match_samples(run, base)
    return replace(
        line,
        change=compare_scores(run, base, resamples),
        nll_change=None if _is_reworded(run, base) else _compare_losses(_NLL, pairs, resamples),
        by_perplexity=_compare_thirds(pairs, base, resamples),
        answer_change=_compare_losses(_ANSWER_LOSS, pairs, resamples),
    )


def summarise(run: Run) -> Line:
    """Return the result of a run, not compared with anything."""
    return replace(
        _summarise(run.task, str(run.facts["title"]), run.method, [run]),
        answer_loss=_mean([sample.answer_loss for sample in run.samples]),
        preparation_seconds=run.facts.get("preparation_seconds"),
    )


def compare_scores(run: Run, base: Run, resamples: int = 10_000) -> Comparison:
    """Return the change of the score against a baseline, with what speaks against reading it.

    Raises:
        RunError: The runs cannot be compared.
    """
    pairs = match_samples(run, base)
    change = paired_bootstrap(*_paired_scores(pairs), resamples)
    return DoubtedComparison.of(change, _find_doubt(pairs, base))


def explain_doubts(lines: Sequence[Line]) -> list[str]:
    """Return a sentence for each reason why changes of the score are not judged."""
    methods: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        if line.change is not None and line.change.doubt is not None:
            methods.setdefault((line.task, line.change.doubt), []).append(line.method)
    return [
        f"{task}: the change of {', '.join(names)} is not judged, because {doubt}."
        for (task, doubt), names in methods.items()
    ]


def _find_doubt(pairs: Pairs, base: Run) -> str | None:
    """Return why a change of the score says nothing, as the end of a sentence, or None."""
    return _doubt_baseline(base, [theirs for _, theirs in pairs]) or _doubt_chance(pairs)


def _doubt_baseline(base: Run, samples: Sequence[Sample]) -> str | None:
    """Doubt a baseline that is mostly unparsed: a gain may be no more than the form of answers."""
    unparsed = sum(sample.parsed is None for sample in samples)
    if base.facts["scoring"] != GENERATION or unparsed <= MOSTLY * len(samples):
        return None
    return (
        f"{base.method} gave no answer in {unparsed:,} of {len(samples):,} outputs of {base.task}"
    )


def _doubt_chance(pairs: Pairs) -> str | None:
    """Doubt two scores whose 95 % intervals both include the chance level, or lie below it."""
    sides = [list(side) for side in zip(*pairs, strict=True)]
    chance = next((known for side in sides if (known := _chance(side)) is not None), None)
    if chance is None or any(_score(side).low > chance for side in sides):
        return None
    return f"both scores are at chance ({100 * chance:.1f} %)"


def match_samples(run: Run, base: Run) -> list[tuple[Sample, Sample]]:
    """Return the pairs of samples of the same question, sorted by id.

    Raises:
        RunError: The questions differ, or a fact that would be mistaken for a gain.
    """
    ours = {sample.id: sample for sample in run.samples}
    theirs = {sample.id: sample for sample in base.samples}
    if ours.keys() != theirs.keys() or any(ours[n].prompt != theirs[n].prompt for n in theirs):
        raise RunError(
            f"{run.method} and {base.method} were not asked the same questions of {run.task}. "
            f"Evaluate both with the same --limit, --seed, --scoring and data."
        )
    for fact in _MUST_AGREE:
        if fact == "batches" and _is_reworded(run, base):
            continue  # prompts of other lengths need other batches
        if run.facts.get(fact) != base.facts.get(fact):
            raise RunError(
                f"{run.method} and {base.method} differ in {fact} on {run.task}, which could be "
                f"mistaken for a gain. Evaluate both in the same way."
            )
    return [(ours[name], theirs[name]) for name in sorted(theirs)]


def _is_reworded(run: Run, base: Run) -> bool:
    """Return whether a method replaced the prompts: their losses are of other tokens then."""
    return bool(run.facts.get("reworded") or base.facts.get("reworded"))


def _compare_losses(
    loss: Callable[[Sample], float | None],
    pairs: Pairs,
    resamples: int,
) -> Comparison | None:
    """Compare a loss over the pairs that have it on both sides."""
    both = [(loss(ours), loss(theirs)) for ours, theirs in pairs]
    known = [(one, other) for one, other in both if one is not None and other is not None]
    if not known:
        return None
    ours, theirs = zip(*known, strict=True)
    return paired_bootstrap(ours, theirs, resamples)


def _compare_thirds(pairs: Pairs, base: Run, resamples: int) -> Mapping[str, Comparison] | None:
    """Compare scores by third of the baseline's perplexity, as the paper does."""
    losses = [theirs.nll for _, theirs in pairs]
    if len(pairs) < len(TERCILES) or any(loss is None for loss in losses):
        return None
    perplexity = [math.exp(min(loss, 700.0)) for loss in losses if loss is not None]
    changes = by_tercile(perplexity, *_paired_scores(pairs), resamples)
    thirds = [[pairs[place] for place in third] for third in split_terciles(perplexity)]
    return {
        name: DoubtedComparison.of(change, _find_doubt(third, base))
        for name, change, third in zip(TERCILES, changes, thirds, strict=True)
    }


def _adjust_p_values(lines: Sequence[Line], against: str) -> list[Line]:
    """Adjust p-values for the number of tasks: some are small by chance."""
    adjusted: dict[tuple[str, str], float] = {}
    for method in {line.method for line in lines} - {against}:
        tested = {line.task: line for line in lines if line.method == method}
        p_values = {name: line.change.p for name, line in tested.items() if line.change}
        for name, p in holm(p_values).items() if p_values else ():
            adjusted[name, method] = p
    return [replace(line, adjusted_p=adjusted.get((line.task, line.method))) for line in lines]


def _average(by_task: Mapping[str, Mapping[str, Run]], against: str, resamples: int) -> list[Line]:
    """Average over all questions together, as the paper does; texts have no right and wrong."""
    scored = [
        by_method
        for by_method in by_task.values()
        if next(iter(by_method.values())).facts["scoring"] != TEXT
    ]
    shared = set.intersection(*map(set, scored)) if len(scored) > 1 else set()
    if against not in shared:
        return []
    lines = []
    for method in sorted(shared, key=lambda name: (name != against, name)):
        runs = [by_method[method] for by_method in scored]
        title = f"all {sum(len(run.samples) for run in runs):,} questions"
        line = _summarise(AVERAGE, title, method, runs)
        if method != against:
            line = replace(line, change=_pool(runs, [one[against] for one in scored], resamples))
        lines.append(line)
    return lines


def _pool(runs: Sequence[Run], bases: Sequence[Run], resamples: int) -> Comparison:
    """Compare the scores of several tasks together; a bad baseline of one spoils them all."""
    parts = {run.task: match_samples(run, base) for run, base in zip(runs, bases, strict=True)}
    change = pooled({task: _paired_scores(pairs) for task, pairs in parts.items()}, resamples)
    doubts = [_doubt_baseline(base, base.samples) for base in bases]
    doubts.append(_doubt_chance([pair for pairs in parts.values() for pair in pairs]))
    return DoubtedComparison.of(change, next(filter(None, doubts), None))


def _summarise(task: str, title: str, method: str, runs: Sequence[Run]) -> Line:
    scorings = sorted({str(run.facts["scoring"]) for run in runs})
    samples = [sample for run in runs for sample in run.samples]
    outputs = [x for run in runs if run.facts["scoring"] == GENERATION for x in run.samples]
    unparsed = sum(sample.parsed is None for sample in outputs)
    return Line(
        task=task,
        title=title,
        method=method,
        scoring=" and ".join(scorings),
        items=len(samples),
        score=_score(samples),
        nll=_mean([sample.nll for sample in samples]),
        chance=_chance(samples),
        unparsed=unparsed if outputs else None,
        unparsed_share=unparsed / len(outputs) if outputs else None,
        near_ties=sum(sample.near_tie for sample in samples),
    )


def _paired_scores(pairs: Pairs) -> tuple[list[float], list[float]]:
    return [ours.score for ours, _ in pairs], [theirs.score for _, theirs in pairs]


def _score(samples: Sequence[Sample]) -> Accuracy:
    scores = [sample.score for sample in samples]
    if len(scores) == 1 and scores[0] not in (0.0, 1.0):
        return Accuracy(scores[0], 0.0, 1.0, 1)  # a single share says nothing about its spread
    return accuracy(scores)


def _chance(samples: Sequence[Sample]) -> float | None:
    """Return the mean probability of guessing right, if it is known for every question."""
    known = [sample.chance for sample in samples]
    return None if None in known else _mean(known)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
