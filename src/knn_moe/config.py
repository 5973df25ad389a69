"""Configs: frozen values that check themselves, and the presets.

Knows the ranges and the paper's defaults. Knows nothing of models, tensors or files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from knn_moe.errors import ConfigError
from knn_moe.support.registry import unknown_name

SIMILARITIES: Final = ("rbf", "rbf-unit", "cosine")
GRADIENTS: Final = ("sparse", "dense")
TOKENS: Final = ("all", "completion")
INDEXES: Final = ("exact", "faiss-flat", "ivfpq", "fast")
HEAD_KEYS: Final = ("router", "hidden")
LEAST_EXAMPLES: Final = 24  # different ones, to calibrate on

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    # §5.1 "Implementation Details": S = 1, η = 2e-2, K = 1, RBF kernel.
    "paper": {
        "build": {"steps": 1, "learning_rate": 2e-2, "gradient": "sparse"},
        "routing": {"k": 1, "similarity": "rbf"},
    },
}

DIMS_STEP: Final = 64  # the kernels of `fast` read this many dimensions at a time
_PROBES: Final = {"ivfpq": 32, "fast": 16}  # the paper's; as many as a recall of 0.95 needs
_BY_KIND: Any = None
_FROM_PRESET: Any = None
_SMALLEST, _LARGEST = 1.2e-38, 3.4e38  # normal fp32 numbers


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """How the nearest keys of a layer are found. A kind ignores the fields it has no use for."""

    kind: str = "exact"  # one of INDEXES
    probes: int = _BY_KIND  # ivfpq, fast: lists of the partition that are searched
    dims: int | None = None  # ivfpq, fast: width after projection. None: the kind's own rule
    bits: int = 4  # fast: of each number of a key, 4 or 8
    value_bits: int = 8  # fast: of each number of a value, 4 or 8
    rerank: bool = False  # ivfpq, fast: keep the keys and order candidates by true distances

    def __post_init__(self) -> None:
        _check_name("index", self.kind, INDEXES)
        if self.probes is _BY_KIND:
            object.__setattr__(self, "probes", _PROBES.get(self.kind, 1))
        _check_count("probes", self.probes, 1)
        if self.dims is not None:
            _check_count("dims", self.dims, 1)
            if self.kind == "fast" and self.dims % DIMS_STEP:
                raise ConfigError(
                    f"dims of fast must be a multiple of {DIMS_STEP}, got {self.dims}."
                )
        for name in ("bits", "value_bits"):
            if getattr(self, name) not in (4, 8):
                raise ConfigError(f"{name} must be 4 or 8, got {getattr(self, name)}.")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON takes them."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """How a memory is built (§4.1). Fields that are left out come from the preset.

    A preset also names the routing the memory is meant for; `attach` uses that by default.
    """

    preset: str = "paper"
    steps: int = _FROM_PRESET  # S, gradient-descent steps
    learning_rate: float = _FROM_PRESET  # η, the step size
    gradient: str = _FROM_PRESET  # "sparse": through the chosen experts; "dense": through all
    tokens: str = "all"  # become cases; "completion": only those that predict a completion
    # Whose next-token loss the steps lower: "all" or "completion". None: that of the cases.
    loss: str | None = None
    max_length: int = 2048  # longer texts are cut into windows of this many tokens
    batch_tokens: int = 8192  # tokens, padding included, in one forward pass

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ConfigError(
                f"{unknown_name('preset', self.preset, PRESETS)} To have settings chosen on your "
                f"examples, use `--calibrate`, or `build_calibrated` in Python."
            )
        for name, value in PRESETS[self.preset]["build"].items():
            if getattr(self, name) is _FROM_PRESET:
                object.__setattr__(self, name, value)
        _check_name("gradient", self.gradient, GRADIENTS)
        _check_name("tokens", self.tokens, TOKENS)
        if self.loss is not None:
            _check_name("loss", self.loss, TOKENS)
        for name, least in (("steps", 0), ("max_length", 2), ("batch_tokens", 1)):
            _check_count(name, getattr(self, name), least)
        _check_rate("learning_rate", self.learning_rate)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON takes them."""
        return asdict(self)

    def routing(self) -> RoutingConfig:
        """Return the routing that the preset names."""
        return RoutingConfig(**PRESETS[self.preset]["routing"])


@dataclass(frozen=True, kw_only=True)
class LayerRouting:
    """The widths and the confidence factor of one layer, in place of those for all layers."""

    layer: int
    gamma_scale: float = 1.0
    confidence_scale: float = 1.0
    confidence_factor: float = 1.0

    def __post_init__(self) -> None:
        _check_count("layer", self.layer, 0)
        _check_widths(self)


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The language-model head of a memory: the tokens that followed its nearest cases are mixed
    into the model's next-token probabilities."""

    k: int = 64  # cases whose next tokens are mixed in
    weight: float = 0.3  # their share of the probability
    # Each case weighs exp(-γ · gamma_scale · d²), with the γ of the keys.
    gamma_scale: float = 3.0
    # What is looked up: the input of the last router, or the last hidden state, as kNN-LM does.
    keys: str = "router"
    alone: bool = False  # leave the routing as it is: kNN-LM alone

    def __post_init__(self) -> None:
        _check_count("head's k", self.k, 1)
        _check_name("head's keys", self.keys, HEAD_KEYS)
        check_width("head's gamma_scale", self.gamma_scale or 0.0)
        if not 0 <= self.weight < 1:
            raise ConfigError(
                f"head's weight must be at least 0 and less than 1, got {self.weight}."
            )


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """How a memory is used (§4.2).

    The paper weighs neighbours and takes λ by one kernel width γ. Here each may have its own
    width, and λ a factor, for all layers or for each of them (`per_layer`, which `calibrate` fits).
    """

    k: int = 1  # K, neighbours recalled per router input
    similarity: str = "rbf"
    gamma: float | None = None  # None: per layer, from the memory's own distances
    gamma_scale: float = 1.0  # widens (< 1) or narrows (> 1) the kernel
    confidence_scale: float | None = None  # the same where λ is taken; None: gamma_scale
    confidence_factor: float = 1.0  # multiplies λ; 0: the router alone
    per_layer: tuple[LayerRouting, ...] = ()  # replaces the three fields above for these layers
    layers: tuple[int, ...] | None = None  # None: every layer the memory has
    # Leave the first token of each sequence to the router: attention may rest on it.
    spare_first_token: bool = False
    stats: bool = True  # count tokens whose experts changed, for `stats()`
    # A config, or a kind of index by name. None: exact, or the index of a compressed memory.
    index: IndexConfig | None = None
    head: HeadConfig | None = None  # also mix in next tokens. None: route only

    def __post_init__(self) -> None:
        _check_count("k", self.k, 1)
        index: object = self.index
        if isinstance(index, str):
            object.__setattr__(self, "index", IndexConfig(kind=index))
        self._read("index", IndexConfig)
        self._read("head", HeadConfig)
        _check_name("similarity", self.similarity, SIMILARITIES)
        check_width("gamma", self.gamma)
        _check_widths(self)
        object.__setattr__(self, "per_layer", _read_layers(self.per_layer))
        if self.layers is not None:
            layers = tuple(dict.fromkeys(self.layers)) if isinstance(self.layers, Iterable) else ()
            if not layers or not all(isinstance(layer, int) for layer in layers):
                raise ConfigError(f"layers must name layers by number, got {self.layers!r}.")
            object.__setattr__(self, "layers", layers)

    def _read(self, field: str, kind: type[IndexConfig | HeadConfig]) -> None:
        """Accept a config as the mapping that JSON has of it."""
        value: object = getattr(self, field)
        if isinstance(value, Mapping):
            object.__setattr__(self, field, kind(**value))
        elif value is not None and not isinstance(value, kind):
            hint = " or the name of an index" if kind is IndexConfig else ""
            raise ConfigError(f"{field} must be of type {kind.__name__}{hint}, got {value!r}.")

    def for_layer(self, layer: int) -> LayerRouting:
        """Return the widths and the factor of `layer`: its own, or those for all layers.

        Where the head is used alone, the factor is 0.
        """
        shared = LayerRouting(
            layer=layer,
            gamma_scale=self.gamma_scale,
            confidence_scale=self.confidence_scale or self.gamma_scale,
            confidence_factor=self.confidence_factor,
        )
        found = next((own for own in self.per_layer if own.layer == layer), shared)
        off = self.head is not None and self.head.alone
        return replace(found, confidence_factor=0.0) if off else found

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON takes them."""
        return as_json(self)


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig:
    """How a reference set is split into parts to fit, to choose and to judge by, and how it is
    read."""

    held_out: float = 0.15  # share of the examples to choose by, and as many again to judge by
    fit_tokens: int = 262144  # read at most to fit
    judge_tokens: int = 16384  # read at most to choose by, and as many again to judge by
    step_tokens: int = 4096  # tokens in a step, at most; fewer where there would be few steps
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 0.5:
            raise ConfigError(f"held_out must be between 0 and 0.5, got {self.held_out}.")
        for name in ("fit_tokens", "judge_tokens", "step_tokens"):
            _check_count(name, getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig(HeldOutConfig):
    """How a memory is calibrated."""

    neighbours: tuple[int, ...] = (8, 32)  # values of K to choose among
    # Learning rates for the values, relative to the spread of a layer's logits; empty: keep them.
    value_rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    passes: int = 2  # over the examples, while values are trained
    # Steps of fitting widths, at most: no more than two passes, and half as many for the next K.
    steps: int = 64
    head: bool = False  # also choose a language-model head

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.neighbours or min(self.neighbours) < 1:
            raise ConfigError(f"neighbours must be numbers from 1 on, got {self.neighbours}.")
        for rate in self.value_rates:
            _check_rate("value_rates", rate)
        for name in ("passes", "steps"):
            _check_count(name, getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True)
class DistilConfig(HeldOutConfig):
    """How a memory is distilled to a few prototypes a layer."""

    prototypes: int = 1024  # P, of each layer; at most one to four cases
    # Learning rates to choose among, relative to the spread of a layer's logits and of its keys.
    rates: tuple[float, ...] = (0.03, 0.1, 0.3)
    passes: int = 4  # over the examples, at most

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count("prototypes", self.prototypes, 1)
        _check_count("passes", self.passes, 1)
        if not self.rates:
            raise ConfigError("rates must name at least one learning rate, got ().")
        for rate in self.rates:
            _check_rate("rates", rate)


def as_json(config: Any) -> dict[str, Any]:
    """Return a dataclass as JSON gives it back: with lists in place of tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return plain


def _read_layers(given: object) -> tuple[LayerRouting, ...]:
    """Accept LayerRoutings, or the mappings that JSON has of them."""
    layers: list[LayerRouting] = []
    for each in given if isinstance(given, Iterable) else (given,):
        layer: object = LayerRouting(**each) if isinstance(each, Mapping) else each
        if not isinstance(layer, LayerRouting):
            raise ConfigError(f"per_layer must be LayerRoutings, got {layer!r}.")
        layers.append(layer)
    numbers = [layer.layer for layer in layers]
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"per_layer names a layer twice: {numbers}.")
    return tuple(layers)


def _check_widths(config: LayerRouting | RoutingConfig) -> None:
    check_width("gamma_scale", config.gamma_scale)
    check_width("confidence_scale", config.confidence_scale)
    if not 0 <= config.confidence_factor <= 1:
        raise ConfigError(f"confidence_factor must be from 0 to 1, got {config.confidence_factor}.")


def check_width(name: str, value: float | None) -> None:
    """Raise ConfigError if a kernel width, or a factor of one, is no positive number."""
    if value is not None and not _SMALLEST <= value <= _LARGEST:
        raise ConfigError(f"{name} must be a positive fp32 number, got {value}.")


def _check_rate(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be positive, got {value}.")


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value}.")


def _check_name(kind: str, value: object, known: Iterable[str]) -> None:
    if value not in list(known):
        raise ConfigError(unknown_name(kind, value, known))
