"""What a memory says of itself: whose it is, how it was built, how it is meant to be used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from knn_moe.config import BuildConfig, RoutingConfig, as_json
from knn_moe.routers.fingerprint import ModelIdentity

BY_CHANCE: Final = "chance"  # how cases are pruned that no example chose
_RENAMED: Final = {"kernels": "per_layer", "trust": "confidence_factor"}  # since format 5
_LIBRARIES: Final = ("knn-moe", "torch", "transformers")


@dataclass(frozen=True, kw_only=True)
class MemoryManifest:
    base_model: ModelIdentity
    tokenizer: Mapping[str, str | None] = field(default_factory=dict)
    build: BuildConfig = field(default_factory=BuildConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    libraries: Mapping[str, str] = field(default_factory=lambda: library_versions())
    calibration: Mapping[str, Any] | None = None  # what `calibrate` found, for people to read
    pruned: Mapping[str, Any] | None = None  # what `prune` left of it, and by what score
    learned: bool = False  # values were changed by a calibration, for all its examples' sake

    def to_dict(self) -> dict[str, Any]:
        return as_json(self)

    @property
    def impartial(self) -> bool:
        """Whether its examples had no say in which cases were kept, nor in others' values."""
        return not self.learned and (self.pruned is None or self.pruned["score"] == BY_CHANCE)

    def uncalibrated(self) -> MemoryManifest:
        """As it was built, where it was calibrated since; learned values stay."""
        if self.calibration is None:
            return self
        return replace(self, routing=self.build.routing(), calibration=None)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> MemoryManifest:
        return cls(
            base_model=ModelIdentity(**config["base_model"]),
            tokenizer=config["tokenizer"],
            build=BuildConfig(**config["build"]),
            routing=RoutingConfig(**_current_names(config["routing"])),
            libraries=config["libraries"],
            calibration=config.get("calibration"),
            pruned=config.get("pruned"),
            learned=config.get("learned", False),
        )


def _current_names(routing: Mapping[str, Any]) -> dict[str, Any]:
    """Return a routing config under current names; formats 3 and 4 had others for some fields."""
    fields = {_RENAMED.get(name, name): value for name, value in routing.items()}
    layers = fields.get("per_layer", ())
    fields["per_layer"] = [{_RENAMED.get(k, k): v for k, v in one.items()} for one in layers]
    return fields


def joined_scores(scores: Iterable[str]) -> str:
    """Of memories that were pruned more than once, or were merged: each once."""
    return " and ".join(dict.fromkeys(name for score in scores for name in score.split(" and ")))


def library_versions() -> dict[str, str]:
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # running from a source tree that is not installed
            versions[name] = "unknown"
    return versions
