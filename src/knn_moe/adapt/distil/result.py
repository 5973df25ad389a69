"""What a distillation found and how much it gains: to be read, applied and written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from knn_moe.adapt.calibrate.judge import Judgement
from knn_moe.adapt.calibrate.result import TrialSummary
from knn_moe.config import RoutingConfig
from knn_moe.errors import MemoryMismatchError
from knn_moe.memory.distilled import DistilledLayer
from knn_moe.memory.memory import RoutingMemory


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """The prototypes, and how much they gain on examples that had no part in them."""

    layers: Mapping[int, DistilledLayer]
    routing: RoutingConfig
    judgement: Judgement
    by_choices: bool  # losses are of the choice among completions, not of tokens
    trials: tuple[TrialSummary, ...]
    chosen: str  # the name of one of the trials
    seconds: float
    seconds_by_part: Mapping[str, float]

    @property
    def helps(self) -> bool:
        """Whether the prototypes were significantly better than the model alone."""
        return self.judgement.better

    @property
    def off(self) -> list[int]:
        """The layers that are left to the router."""
        return [one.layer for one in self.routing.per_layer if one.confidence_factor == 0]

    def report(self) -> dict[str, Any]:
        """Return the findings as a memory's config keeps them."""
        judged = asdict(self.judgement)
        by_layer = judged.pop("mean_confidence")
        return {
            "helps": self.helps,
            "by_choices": self.by_choices,
            **judged,
            "mean_confidence": {str(layer): value for layer, value in by_layer.items()},
            "chosen": self.chosen,
            "trials": [asdict(trial) for trial in self.trials],
            "off": self.off,
            "seconds": round(self.seconds, 1),
            "seconds_by_part": {part: round(s, 2) for part, s in self.seconds_by_part.items()},
        }

    def apply(self, memory: RoutingMemory) -> RoutingMemory:
        """Return the distilled form of `memory`, which must be the one that was distilled. It has
        no head.

        Raises:
            MemoryMismatchError: It is another one.
        """
        last = max(int(layer.cases.max()) for layer in self.layers.values())
        if last >= len(memory) or memory.layers.keys() < self.layers.keys():
            raise MemoryMismatchError(f"{memory!r} is not the memory that was distilled.")
        manifest = replace(
            memory.manifest,
            routing=self.routing,
            calibration=self.report(),
            values_trained=True,
            random_seed=None,
        )
        return replace(
            memory,
            layers=dict(self.layers),
            manifest=manifest,
            folder=None,
            head_keys=None,
            _holds=None,
        )
