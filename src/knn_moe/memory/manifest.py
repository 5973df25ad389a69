"""What a memory says of itself: whose it is, how it was built, how it is meant to be used."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from knn_moe.config import PRESETS, BuildConfig, RoutingConfig, as_json
from knn_moe.memory.schema import read_fields, read_value
from knn_moe.routers.fingerprint import ModelIdentity, RouterSketch

BY_CHANCE: Final = "chance"  # how cases are pruned that no example chose
# Fields of a routing config that formats 3 and 4 name otherwise.
_RENAMED: Final = {"kernels": "per_layer", "trust": "confidence_factor"}
_LIBRARIES: Final = ("knn-moe", "torch", "transformers")


@dataclass(frozen=True, kw_only=True)
class MemoryManifest:
    """Everything in memory_config.json but the list of files."""

    base_model: ModelIdentity
    tokenizer: Mapping[str, str | None] = field(default_factory=dict)
    build: BuildConfig = field(default_factory=BuildConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    libraries: Mapping[str, str] = field(default_factory=lambda: library_versions())
    calibration: Mapping[str, Any] | None = None  # what `calibrate` found, for people to read
    pruned: Mapping[str, Any] | None = None  # how many cases `prune` left, and by what score
    values_trained: bool = False  # a calibration fitted the values to all its examples
    # A control: K cases drawn at random, by this seed, stand in for the K nearest.
    random_seed: int | None = None
    # Of the base model's router weights: tells it in every precision. Earlier memories have none.
    router_sketch: RouterSketch | None = None
    # The fingerprint of each layer's router, by its number. Earlier memories have none.
    router_digests: Mapping[str, str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON takes them."""
        return as_json(self)

    @property
    def examples_can_judge(self) -> bool:
        """Whether the memory's own examples had no part in choosing its cases or their values."""
        by_chance = self.pruned is None or self.pruned["score"] == BY_CHANCE
        return not self.values_trained and by_chance

    def without_calibration(self) -> MemoryManifest:
        """Return to the routing of the build, where the memory was calibrated since."""
        if self.calibration is None:
            return self
        return replace(self, routing=self.build.routing(), calibration=None)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> MemoryManifest:
        """Read what `to_dict` gave, in this version or in an earlier one.

        Raises:
            MemoryFormatError: A field is missing, of another type or outside its range.
        """
        build, routing = (
            read_value(Mapping[str, Any], config.get(name), f"The config's {name}")
            for name in ("build", "routing")
        )
        if routing.get("gate") is not None:
            warnings.warn(
                "This memory names a gate, which knn-moe does not have. It is used without it.",
                stacklevel=3,
            )
        seed, trained = routing.get("drawn"), config.get("learned", False)
        renamed = {
            **config,
            "build": rename_build(build),
            "routing": rename_routing(routing),
            "values_trained": config.get("values_trained", trained),
            "random_seed": config.get("random_seed", seed),
        }
        manifest = read_fields(cls, renamed, "The config", others=True)
        if manifest.calibration is not None:
            _check_calibration(manifest.calibration)
        if manifest.pruned is not None:
            read_fields(_Pruning, manifest.pruned, "The config's pruned", others=True)
        return manifest


@dataclass(frozen=True)
class _Change:
    """A change of the loss per token, as a calibration tells it."""

    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class _Calibration:
    """What is shown of a calibration. A memory keeps more, which nothing but people reads."""

    helps: bool
    change: Mapping[str, Any]
    examples: int
    head: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _Pruning:
    """What is shown of a pruning, and joined when memories are merged."""

    kept: int
    cases: int
    score: str
    rounds: int


def _check_calibration(told: Mapping[str, Any]) -> None:
    where = "The config's calibration"
    found = read_fields(_Calibration, told, where, others=True)
    read_fields(_Change, found.change, f"{where}: change", others=True)
    if found.head is not None and found.head.get("helps"):
        read_fields(_Change, found.head.get("change"), f"{where}: head: change", others=True)


def rename_build(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a BuildConfig of this version or an earlier one.

    A preset that this version does not have becomes the default; what it stood for is in the other
    fields.
    """
    preset = fields.get("preset")
    unknown = isinstance(preset, str) and preset not in PRESETS
    return {**fields, "preset": BuildConfig.preset} if unknown else dict(fields)


def rename_routing(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a RoutingConfig, of this version or an earlier one, as they are now."""
    routing = _rename(fields)
    per_layer = read_value(tuple[Mapping[str, Any], ...], routing.get("per_layer", []), "per_layer")
    routing["per_layer"] = [_rename(one) for one in per_layer]
    for name in ("drawn", "gate", "gate_share"):  # which this version does not have
        routing.pop(name, None)
    return routing


def _rename(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {_RENAMED.get(name, name): value for name, value in fields.items()}


def join_scores(scores: Iterable[str]) -> str:
    """Name each score once, for memories that were pruned more than once or merged."""
    return " and ".join(dict.fromkeys(name for score in scores for name in score.split(" and ")))


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that a memory depends on."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # running from a source tree that is not installed
            versions[name] = "unknown"
    return versions
