"""Settings, as frozen values that check themselves, and the presets.

Knows the ranges and the paper's defaults. Knows nothing of models, tensors or files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from knn_moe.errors import ConfigError

SIMILARITIES: Final = ("rbf", "rbf-unit", "cosine")
GRADIENTS: Final = ("sparse", "dense")
TOKENS: Final = ("all", "completion")
ENTROPY, CONFIDENCE = "entropy", "confidence"
GATES: Final = (ENTROPY, CONFIDENCE)

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    # §5.1 "Implementation Details": S = 1, η = 2e-2, K = 1, RBF kernel.
    "paper": {
        "build": {"steps": 1, "learning_rate": 2e-2, "gradient": "sparse"},
        "routing": {"k": 1, "similarity": "rbf"},
    },
    # Chosen on trained models and text they had not seen: docs/method.md, "The strong preset".
    "strong": {
        "build": {"steps": 5, "learning_rate": 2.0, "gradient": "dense"},
        "routing": {"k": 16, "similarity": "rbf", "gamma_scale": 1.5, "confidence_scale": 0.2},
    },
}

INDEXES: Final = ("exact", "faiss-flat", "ivfpq", "fast")
DIMS_STEP: Final = 64  # of `fast`: what its kernels read at a time
_PROBES: Final = {"ivfpq": 32, "fast": 16}  # the paper's; as many as recall asks for
_BY_KIND: Any = None
_FROM_PRESET: Any = None
_SMALLEST, _LARGEST = 1.2e-38, 3.4e38  # normal numbers of fp32


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """How a layer's nearest keys are found. What a kind has no use for, it passes over."""

    kind: str = "exact"  # one of INDEXES
    probes: int = _BY_KIND  # ivfpq, fast: lists of the partition that are searched
    dims: int | None = None  # ivfpq, fast: width after projection. None: the kind's own rule
    bits: int = 4  # fast: of each number of a key, 4 or 8
    value_bits: int = 8  # fast: of each number of a value, 4 or 8
    rerank: bool = False  # ivfpq, fast: keep the keys; true distances order the candidates

    def __post_init__(self) -> None:
        if self.kind not in INDEXES:
            raise ConfigError(f"Unknown index {self.kind!r}. Available: {', '.join(INDEXES)}.")
        if self.probes is _BY_KIND:
            object.__setattr__(self, "probes", _PROBES.get(self.kind, 1))
        if not isinstance(self.probes, int) or self.probes < 1:
            raise ConfigError(f"probes must be a whole number of at least 1, got {self.probes}.")
        if self.dims is not None and (not isinstance(self.dims, int) or self.dims < 1):
            raise ConfigError(f"dims must be a whole number of at least 1, got {self.dims}.")
        if self.kind == "fast" and self.dims is not None and self.dims % DIMS_STEP:
            raise ConfigError(f"dims of fast must be a multiple of {DIMS_STEP}, got {self.dims}.")
        for name in ("bits", "value_bits"):
            if getattr(self, name) not in (4, 8):
                raise ConfigError(f"{name} must be 4 or 8, got {getattr(self, name)}.")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """How a memory is built (§4.1). What is left out comes from the preset.

    A preset also names the routing the memory is meant for; `attach` uses that by default.
    """

    preset: str = "paper"
    steps: int = _FROM_PRESET  # S, gradient-descent steps
    learning_rate: float = _FROM_PRESET  # η
    gradient: str = _FROM_PRESET  # "sparse": through the chosen experts; "dense": through all
    tokens: str = "all"  # "completion": only the tokens that predict a completion
    max_length: int = 2048  # longer texts are cut into windows of this many tokens
    batch_tokens: int = 8192  # tokens, padding included, in one forward pass

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ConfigError(_unknown("preset", self.preset, tuple(PRESETS)))
        for name, value in PRESETS[self.preset]["build"].items():
            if getattr(self, name) is _FROM_PRESET:
                object.__setattr__(self, name, value)
        if self.gradient not in GRADIENTS:
            raise ConfigError(_unknown("gradient", self.gradient, GRADIENTS))
        if self.tokens not in TOKENS:
            raise ConfigError(_unknown("tokens", self.tokens, TOKENS))
        for name, least in (("steps", 0), ("max_length", 2), ("batch_tokens", 1)):
            _check_count(name, getattr(self, name), least)
        if not 0 < self.learning_rate < float("inf"):
            raise ConfigError(f"learning_rate must be positive, got {self.learning_rate}.")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def routing(self) -> RoutingConfig:
        """The routing this memory is meant for."""
        return RoutingConfig(**PRESETS[self.preset]["routing"])


@dataclass(frozen=True, kw_only=True)
class LayerRouting:
    """One layer's own kernels, where it has its own: fields as RoutingConfig's."""

    layer: int
    gamma_scale: float = 1.0
    confidence_scale: float = 1.0
    confidence_factor: float = 1.0

    def __post_init__(self) -> None:
        _check_count("layer", self.layer, 0)
        _check_kernel(self)


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """A memory's head (head.py): what followed its nearest cases, mixed into the model's logits."""

    k: int = 64  # cases that say what followed
    weight: float = 0.3  # of what they say; the model's own has the rest
    gamma_scale: float = 3.0  # of the last layer's γ: exp(-γ · gamma_scale · d²) each

    def __post_init__(self) -> None:
        _check_count("head's k", self.k, 1)
        _check_width("head's gamma_scale", self.gamma_scale or 0.0)
        if not 0 <= self.weight < 1:
            raise ConfigError(
                f"head's weight must be at least 0 and less than 1, got {self.weight}."
            )


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """How a memory is used (§4.2).

    The paper weighs neighbours and takes λ by one kernel. Here each may have its own width, and λ
    a factor, for all layers or for each (`per_layer`, which `calibrate` fits).
    """

    k: int = 1  # K, neighbours recalled per router input
    similarity: str = "rbf"
    gamma: float | None = None  # None: per layer, from the memory's own distances
    gamma_scale: float = 1.0  # widens (< 1) or narrows (> 1) the kernel
    confidence_scale: float | None = None  # the same where λ is taken; None: gamma_scale
    confidence_factor: float = 1.0  # λ's factor; 0: the router alone
    per_layer: tuple[LayerRouting, ...] = ()  # of these layers, instead of the three above
    layers: tuple[int, ...] | None = None  # None: every layer the memory has
    stats: bool = True  # count tokens whose experts changed, for `stats()`
    # Or a kind of index, by name. None: exact, or the index of a compressed memory.
    index: IndexConfig | None = None
    # Leave tokens to the router alone, those it is sure of ("entropy") or those unlike what is
    # remembered ("confidence"): see gate.py. None: no token.
    gate: str | None = None
    gate_share: float = 1 / 3  # of the memory's cases, by their entropy; or λ itself, at most
    # Also tell the next token, from what followed the nearest cases. None: route only.
    head: HeadConfig | None = None
    # A control (controls.py): K cases drawn at random, by this seed, stand in for the K nearest.
    drawn: int | None = None

    def __post_init__(self) -> None:
        _check_count("k", self.k, 1)
        index: object = self.index
        if isinstance(index, str):
            object.__setattr__(self, "index", IndexConfig(kind=index))
        elif isinstance(index, Mapping):
            object.__setattr__(self, "index", IndexConfig(**index))
        elif not isinstance(index, IndexConfig | None):
            raise ConfigError(f"index must be an IndexConfig or its kind, got {index!r}.")
        head: object = self.head
        if isinstance(head, Mapping):
            object.__setattr__(self, "head", HeadConfig(**head))
        elif not isinstance(head, HeadConfig | None):
            raise ConfigError(f"head must be a HeadConfig, got {head!r}.")
        if self.similarity not in SIMILARITIES:
            raise ConfigError(_unknown("similarity", self.similarity, SIMILARITIES))
        _check_width("gamma", self.gamma)
        _check_kernel(self)
        object.__setattr__(self, "per_layer", _per_layer(self.per_layer))
        if self.gate is not None and self.gate not in GATES:
            raise ConfigError(_unknown("gate", self.gate, GATES))
        if not 0 <= self.gate_share <= 1:
            raise ConfigError(f"gate_share must be from 0 to 1, got {self.gate_share}.")
        if self.drawn is not None:
            _check_count("drawn", self.drawn, 0)
        if self.layers is not None:
            layers = tuple(dict.fromkeys(self.layers)) if isinstance(self.layers, Iterable) else ()
            if not layers or not all(isinstance(layer, int) for layer in layers):
                raise ConfigError(f"layers must name layers by number, got {self.layers!r}.")
            object.__setattr__(self, "layers", layers)

    def for_layer(self, layer: int) -> LayerRouting:
        """Of a layer: its own, or the one for all."""
        for own in self.per_layer:
            if own.layer == layer:
                return own
        wide = self.gamma_scale if self.confidence_scale is None else self.confidence_scale
        return LayerRouting(
            layer=layer,
            gamma_scale=self.gamma_scale,
            confidence_scale=wide,
            confidence_factor=self.confidence_factor,
        )

    def to_dict(self) -> dict[str, Any]:
        return as_json(self)


def as_json(config: Any) -> dict[str, Any]:
    """A dataclass as JSON gives it back: no tuple is left that a file would make a list."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return plain


def _per_layer(given: object) -> tuple[LayerRouting, ...]:
    """Kernels, or what their fields are in JSON."""
    kernels: list[LayerRouting] = []
    for each in given if isinstance(given, Iterable) else (given,):
        kernel: object = LayerRouting(**each) if isinstance(each, Mapping) else each
        if not isinstance(kernel, LayerRouting):
            raise ConfigError(f"per_layer must be LayerRoutings, got {kernel!r}.")
        kernels.append(kernel)
    layers = [kernel.layer for kernel in kernels]
    if len(set(layers)) < len(layers):
        raise ConfigError(f"per_layer names a layer twice: {layers}.")
    return tuple(kernels)


def _check_kernel(kernel: LayerRouting | RoutingConfig) -> None:
    _check_width("gamma_scale", kernel.gamma_scale)
    _check_width("confidence_scale", kernel.confidence_scale)
    if not 0 <= kernel.confidence_factor <= 1:
        raise ConfigError(f"confidence_factor must be from 0 to 1, got {kernel.confidence_factor}.")


def _check_width(name: str, value: float | None) -> None:
    if value is not None and not _SMALLEST <= value <= _LARGEST:
        raise ConfigError(f"{name} must be a positive fp32 number, got {value}.")


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value}.")


def _unknown(what: str, value: object, known: tuple[str, ...]) -> str:
    return f"Unknown {what} {value!r}. Available: {', '.join(known)}."
