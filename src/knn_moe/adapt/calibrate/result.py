"""What a calibration found and how much it gains: to be read, applied and written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from knn_moe.adapt.calibrate.judge import Judgement
from knn_moe.adapt.calibrate.language_head import HeadChoice
from knn_moe.config import RoutingConfig
from knn_moe.memory.memory import RoutingMemory
from knn_moe.memory.writer import reseal


@dataclass(frozen=True)
class TrialSummary:
    """One way to use the memory, and its loss per token on the examples to choose by."""

    name: str
    loss: float
    change: float  # against the model alone
    low: float
    high: float


@dataclass(frozen=True)
class TokenChoice:
    """Which tokens became cases and whose loss was lowered, and the loss per token to choose by."""

    tokens: str
    loss_of: str
    loss: float


@dataclass(frozen=True)
class Distances:
    """The mean γ d² from a layer's inputs to the nearest and to the last neighbour recalled."""

    nearest: float
    last: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was chosen, and how much it gains on examples that had no part in the choice."""

    routing: RoutingConfig
    judgement: Judgement
    by_choices: bool  # losses are of the choice among completions, not of tokens
    trials: tuple[TrialSummary, ...]
    chosen: str  # the name of one of the trials
    distances: Mapping[int, Distances]  # by layer
    values: Mapping[int, Tensor] | None  # by layer [M, N]; None: as the memory has them
    update_scale: Mapping[int, float]  # by layer, see start.py
    values_trained: bool
    seconds: float
    seconds_by_part: Mapping[str, float]
    start: Mapping[float, float]  # the loss per token by how far values were moved, see start.py
    head: HeadChoice | None = None  # the likeliest, where one was wanted; used if it helps
    token_choices: tuple[TokenChoice, ...] = ()  # the best first, where the build chose among some

    @property
    def helps(self) -> bool:
        """Whether the memory was significantly better than the model alone."""
        return self.judgement.better

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
            "distances": {str(layer): asdict(one) for layer, one in self.distances.items()},
            "update_scale": {str(layer): _round(x) for layer, x in self.update_scale.items()},
            "values_trained": self.values_trained,
            "head": self.head.report() if self.head else None,
            "start": {f"{distance:g}": round(loss, 6) for distance, loss in self.start.items()},
            "token_choices": [asdict(choice) for choice in self.token_choices],
            "seconds": round(self.seconds, 1),
            "seconds_by_part": {part: round(s, 2) for part, s in self.seconds_by_part.items()},
        }

    def apply(self, memory: RoutingMemory) -> RoutingMemory:
        """Return `memory` with the routing and the values that were found for it."""
        manifest = replace(memory.manifest, routing=self.routing, calibration=self.report())
        # Where values or head keys change, the memory's folder does not hold what this one holds.
        if self.head and self.head.helps and self.head.keys is not memory.head_keys:
            memory = replace(memory, head_keys=self.head.keys, folder=None)
        if self.values is None:
            return replace(memory, manifest=manifest)
        layers = {
            index: replace(layer, values=self.values.get(index, layer.values))
            for index, layer in memory.full_layers().items()
        }
        manifest = replace(manifest, values_trained=True)
        return replace(memory, manifest=manifest, layers=layers, folder=None)


def _round(number: float) -> float:
    return float(f"{number:.4g}")


def write_calibrated(
    memory: RoutingMemory, folder: Path, *, in_place: bool = True, overwrite: bool = False
) -> RoutingMemory:
    """Write a calibrated memory and open it.

    Args:
        memory: What `Calibration.apply` returned.
        folder: Where to write it.
        in_place: The memory was opened from `folder`: where neither values nor head keys changed,
            only its manifest is written.
        overwrite: Replace another memory that is in `folder`.
    """
    if in_place and memory.folder is not None:
        reseal(folder, memory.manifest)
    else:
        memory.save_pretrained(folder, overwrite=in_place or overwrite)
    return RoutingMemory.from_pretrained(folder, verify=False)
