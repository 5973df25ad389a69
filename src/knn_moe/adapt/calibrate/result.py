"""What a calibration found, and what it is worth: to be read, applied and written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from knn_moe.adapt.calibrate.judge import Judgement
from knn_moe.adapt.calibrate.language_head import HeadFound
from knn_moe.config import BuildConfig, RoutingConfig
from knn_moe.memory.memory import RoutingMemory
from knn_moe.memory.writer import reseal


@dataclass(frozen=True)
class Outcome:
    """One way to use the memory, and the loss a token on the examples to choose by."""

    name: str
    loss: float
    change: float  # against the model alone
    low: float
    high: float


@dataclass(frozen=True)
class Candidate:
    """A way to find better logits, and the sample's loss a token when they are recalled."""

    gradient: str
    learning_rate: float
    steps: int
    loss: float = float("nan")

    def of(self, base: BuildConfig) -> BuildConfig:
        return replace(
            base, gradient=self.gradient, learning_rate=self.learning_rate, steps=self.steps
        )


@dataclass(frozen=True)
class Distances:
    """From a layer's inputs to the nearest and to the last case recalled, of other examples: the
    mean of γ d²."""

    nearest: float
    last: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was chosen, and what it is worth on examples that had no part in the choice."""

    routing: RoutingConfig
    judgement: Judgement
    trials: tuple[Outcome, ...]
    chosen: str  # its name among the trials
    distances: Mapping[int, Distances]  # by layer
    values: Mapping[int, Tensor] | None  # by layer [M, N]; None: as they were
    update_scale: Mapping[int, float]  # by layer: how much is made of what the build changed
    learned: bool  # whether values learned from those who recall them
    seconds: float
    seconds_by_part: Mapping[str, float]
    head: HeadFound | None = None  # the likeliest, where one was asked for; used if it helps
    targets: tuple[Candidate, ...] = ()  # the one taken first, where the build chose among some

    @property
    def helps(self) -> bool:
        """Whether the memory was better than the model alone, beyond chance."""
        return self.judgement.better

    def report(self) -> dict[str, Any]:
        """What it is worth and how that was found, for a memory's config."""
        judged = asdict(self.judgement)
        by_layer = judged.pop("mean_confidence")
        return {
            "helps": self.helps,
            **judged,
            "mean_confidence": {str(layer): value for layer, value in by_layer.items()},
            "chosen": self.chosen,
            "trials": [asdict(trial) for trial in self.trials],
            "distances": {str(layer): asdict(one) for layer, one in self.distances.items()},
            "update_scale": {
                str(layer): round(value, 4) for layer, value in self.update_scale.items()
            },
            "values_learned": self.learned,
            "head": asdict(self.head) if self.head else None,
            "targets": [asdict(target) for target in self.targets],
            "seconds": round(self.seconds, 1),
            "seconds_by_part": {what: round(s, 2) for what, s in self.seconds_by_part.items()},
        }

    def apply(self, memory: RoutingMemory) -> RoutingMemory:
        """`memory`, used in this way, with the values that were found for it."""
        manifest = replace(memory.manifest, routing=self.routing, calibration=self.report())
        if self.values is None:
            return replace(memory, manifest=manifest)
        manifest = replace(manifest, learned=True)
        layers = {
            index: replace(layer, values=self.values.get(index, layer.values))
            for index, layer in memory.full_layers().items()
        }
        # What lies in the memory's folder is not what this one holds.
        return replace(memory, manifest=manifest, layers=layers, folder=None)


def write_calibrated(memory: RoutingMemory, folder: Path) -> RoutingMemory:
    """Into the folder it was opened from: the manifest alone, or all of it where values changed."""
    if memory.folder is None:
        memory.save_pretrained(folder, overwrite=True)
    else:
        reseal(folder, memory.manifest)
    return RoutingMemory.from_pretrained(folder, verify=False)
