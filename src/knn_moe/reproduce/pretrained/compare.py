"""Compare the runs of a study: each with zero-shot and with a kNN-LM of the same rows.

p-values are adjusted by Holm's method for the number of tasks, method by method.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, TypeAlias

from knn_moe.evaluation.compare import compare_scores, match_samples, summarise
from knn_moe.evaluation.store import Run
from knn_moe.reproduce.pretrained.plan import BASE, RIVAL, RunSpec
from knn_moe.reproduce.pretrained.study import PretrainedStudy
from knn_moe.support.statistics import Accuracy, Comparison, accuracy, holm, paired_bootstrap
from knn_moe.tasks.task import TEXT

Family: TypeAlias = Callable[[RunSpec], Hashable]  # the runs whose p-values are adjusted together
_ALPHA: Final = 0.05


@dataclass(frozen=True)
class Change:
    """A paired difference, and its p-value adjusted for the number of tasks."""

    comparison: Comparison
    adjusted_p: float = 1.0

    @property
    def difference(self) -> float:
        return self.comparison.difference

    @property
    def significant(self) -> bool:
        return self.adjusted_p < _ALPHA and self.difference != 0 and self.comparison.doubt is None


@dataclass(frozen=True)
class Result:
    """What a run scored, and its changes against other methods, by their names.

    Scores are shares of right answers; of a text, the loss per token in nats, of which less is
    better.
    """

    spec: RunSpec
    title: str
    is_text: bool
    score: Accuracy
    seconds: float | None  # of preparation
    chance: float | None  # share of right answers by chance
    unparsed_share: float | None  # of the outputs; None: nothing was generated
    changes: Mapping[str, Change] = field(default_factory=dict)

    def is_better(self, than: str = BASE) -> bool:
        """Return whether it is significantly better than another method."""
        change = self.changes.get(than)
        return change is not None and change.significant and self._gain(change) > 0

    def is_doubted(self) -> bool:
        """Return whether its change against zero-shot must not be read as better or worse."""
        change = self.changes.get(BASE)
        return change is not None and change.comparison.doubt is not None

    def is_worse(self, than: str = BASE) -> bool:
        """Return whether it is significantly worse than another method."""
        change = self.changes.get(than)
        return change is not None and change.significant and self._gain(change) < 0

    def _gain(self, change: Change) -> float:
        return -change.difference if self.is_text else change.difference


Results: TypeAlias = Mapping[RunSpec, Result]


class Comparer:
    """Compares the runs of a study, each once: several tables show the same ones."""

    def __init__(self, study: PretrainedStudy) -> None:
        self.study = study
        self._results: dict[RunSpec, Result | None] = {}
        # A run, zero-shot and a kNN-LM: all runs together may not fit into memory.
        self._run = lru_cache(maxsize=4)(study.find_run)

    def compare(self, specs: Sequence[RunSpec], family: Family) -> Results:
        """Return the results of the runs that are there.

        Args:
            specs: The runs; those that are missing are left out.
            family: Tells which runs are tested together.
        """
        for spec in sorted(specs, key=lambda spec: (spec.model, spec.task, spec.size or 0)):
            if spec not in self._results:
                self._results[spec] = self._result(spec)
        found = {spec: result for spec in specs if (result := self._results[spec]) is not None}
        return _adjust(found, family)

    def _result(self, spec: RunSpec) -> Result | None:
        run = self._run(spec)
        if run is None:
            return None
        base, line = RunSpec(spec.model, spec.task, BASE), summarise(run)
        changes = {
            other.method: Change(_difference(run, theirs))
            for other in (base, self._rival(spec))
            if other != spec and (theirs := self._run(other)) is not None
        }
        return Result(
            spec,
            str(run.facts["title"]),
            run.facts["scoring"] == TEXT,
            accuracy(_scores(run)),
            run.facts.get("preparation_seconds"),
            line.chance,
            line.unparsed_share,
            changes,
        )

    def _rival(self, spec: RunSpec) -> RunSpec:
        """Return the kNN-LM that learned from the same rows, or from the task's own."""
        if spec.source is None:
            return self.study.own(spec.model, spec.task, RIVAL)
        return replace(spec, method=RIVAL)


def _scores(run: Run) -> list[float]:
    if run.facts["scoring"] != TEXT:
        return [sample.score for sample in run.samples]
    return [sample.nll for sample in run.samples if sample.nll is not None]


def _difference(run: Run, other: Run) -> Comparison:
    if run.facts["scoring"] != TEXT:
        return compare_scores(run, other)
    pairs = match_samples(run, other)
    ours = replace(run, samples=[one for one, _ in pairs])
    theirs = replace(other, samples=[one for _, one in pairs])
    return paired_bootstrap(_scores(ours), _scores(theirs))


def _adjust(found: Mapping[RunSpec, Result], family: Family) -> Results:
    adjusted = dict(found)
    for than in (BASE, RIVAL):
        families: dict[Hashable, dict[str, RunSpec]] = {}
        for spec, result in found.items():
            if than in result.changes:
                families.setdefault(family(spec), {})[str(spec)] = spec
        for members in families.values():
            p_values = {
                name: found[spec].changes[than].comparison.p for name, spec in members.items()
            }
            for name, p in holm(p_values).items():
                result = adjusted[members[name]]
                change = replace(result.changes[than], adjusted_p=p)
                changes = {**result.changes, than: change}
                adjusted[members[name]] = replace(result, changes=changes)
    return adjusted
