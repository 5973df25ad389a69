"""What attached memories have done, by layer, and how a notebook and `print` show it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from knn_moe.inference.hooks import LayerStats, RecallHook
from knn_moe.support.summary_table import SummaryTable

_COLUMNS: Final = ("layer", "calls", "tokens", "mean λ", "rerouted")


class RoutingStats(dict[int, LayerStats]):
    """The stats of one memory by layer."""

    @classmethod
    def of(cls, hooks: Iterable[RecallHook]) -> RoutingStats:
        """Return what the hooks of a memory have counted."""
        return cls({hook.router.layer: hook.stats() for hook in hooks})

    def __str__(self) -> str:
        return self._table().to_text()

    def _repr_html_(self) -> str:
        return self._table().to_html()

    def _table(self) -> SummaryTable:
        return SummaryTable(
            title="Since the memory was attached",
            columns=_COLUMNS,
            rows=_rows(self),
            texts=0,
        )


class StatsByMemory(dict[str, RoutingStats]):
    """The stats of several memories, by name and layer."""

    def __str__(self) -> str:
        return self._table().to_text()

    def _repr_html_(self) -> str:
        return self._table().to_html()

    def _table(self) -> SummaryTable:
        return SummaryTable(
            title="Since the memories were attached",
            columns=("memory", *_COLUMNS),
            rows=[(name, *row) for name, stats in self.items() for row in _rows(stats)],
        )


def _rows(stats: RoutingStats) -> list[Sequence[str]]:
    return [
        (
            str(layer),
            f"{one.calls:,}",
            f"{one.tokens:,}",
            f"{one.mean_confidence:.2f}",
            "-" if one.changed is None else f"{one.changed:.0%}",
        )
        for layer, one in stats.items()
    ]
