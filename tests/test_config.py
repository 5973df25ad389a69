"""Settings: the paper's by default, checked when made, the same again from their dictionary."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from knn_moe.config import PRESETS, BuildConfig, IndexConfig, LayerRouting, RoutingConfig
from knn_moe.errors import ConfigError


def test_the_default_is_the_papers_setting() -> None:
    build, routing = BuildConfig(), RoutingConfig()
    assert (build.preset, build.steps, build.learning_rate) == ("paper", 1, 0.02)
    assert (build.gradient, build.tokens) == ("sparse", "all")
    assert (routing.k, routing.similarity, routing.gamma) == (1, "rbf", None)
    assert build.routing() == routing


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_valid_and_complete(preset: str) -> None:
    build = BuildConfig(preset=preset)
    assert [name for name, value in build.to_dict().items() if value is None] == ["loss"]
    assert build.to_dict().items() >= PRESETS[preset]["build"].items()
    assert build.routing().to_dict().items() >= PRESETS[preset]["routing"].items()


def test_what_is_given_wins_over_the_preset() -> None:
    build = BuildConfig(preset="paper", steps=0, learning_rate=5)
    assert (build.steps, build.learning_rate, build.gradient) == (0, 5, "sparse")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "best"}, "Unknown preset 'best'. Available: paper. To have settings"),
        ({"gradient": "straight"}, "Unknown gradient 'straight'. Available: sparse, dense."),
        ({"tokens": "prompt"}, "Unknown tokens 'prompt'. Available: all, completion."),
        ({"steps": -1}, "steps must be a whole number of at least 0, got -1."),
        ({"max_length": 1}, "max_length must be a whole number of at least 2, got 1."),
        ({"batch_tokens": 0}, "batch_tokens must be a whole number of at least 1, got 0."),
        ({"learning_rate": 0}, "learning_rate must be positive, got 0."),
        ({"learning_rate": -0.1}, "learning_rate must be positive, got -0.1."),
        ({"learning_rate": float("nan")}, "learning_rate must be positive, got nan."),
        ({"learning_rate": float("inf")}, "learning_rate must be"),
    ],
)
def test_a_wrong_build_setting(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        BuildConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "k must be a whole number of at least 1, got 0."),
        ({"similarity": "l2"}, "Unknown similarity 'l2'. Available: rbf, rbf-unit, cosine."),
        ({"gamma": 0}, "gamma must be a positive fp32 number, got 0."),
        ({"gamma": -1.0}, "gamma must be a positive fp32 number, got -1.0."),
        ({"gamma": float("nan")}, "gamma must be a positive fp32 number, got nan."),
        ({"gamma_scale": 0}, "gamma_scale must be a positive fp32 number, got 0."),
        ({"gamma_scale": float("inf")}, "gamma_scale must be"),
        ({"confidence_scale": 0}, "confidence_scale must be a positive fp32 number, got 0."),
        ({"confidence_factor": 1.5}, "confidence_factor must be from 0 to 1, got 1.5."),
        ({"per_layer": ({"layer": -1},)}, "layer must be a whole number of at least 0, got -1."),
        (
            {"per_layer": ({"layer": 1, "confidence_factor": -1},)},
            "confidence_factor must be from 0 to 1, got -1.",
        ),
        ({"per_layer": ({"layer": 1}, {"layer": 1})}, "per_layer names a layer twice: [1, 1]."),
        ({"per_layer": 3}, "per_layer must be LayerRoutings, got 3."),
        ({"index": "hnsw"}, "Unknown index 'hnsw'. Available: exact, faiss-flat, ivfpq, fast."),
        ({"index": 3}, "index must be of type IndexConfig or the name of an index, got 3."),
    ],
)
def test_a_wrong_routing_setting(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        RoutingConfig(**settings)


def test_the_kernel_of_a_layer() -> None:
    one = RoutingConfig(gamma_scale=0.3).for_layer(5)
    assert one == LayerRouting(
        layer=5, gamma_scale=0.3, confidence_scale=0.3, confidence_factor=1.0
    )
    own = LayerRouting(layer=2, gamma_scale=2.0, confidence_scale=0.1, confidence_factor=0.5)
    two = RoutingConfig(
        gamma_scale=0.3, confidence_scale=0.7, confidence_factor=0.9, per_layer=(own,)
    )
    assert two.for_layer(2) == own
    assert two.for_layer(5) == LayerRouting(
        layer=5, gamma_scale=0.3, confidence_scale=0.7, confidence_factor=0.9
    )
    assert RoutingConfig(**json.loads(json.dumps(two.to_dict()))) == two


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "hnsw"}, "Unknown index 'hnsw'. Available: exact, faiss-flat, ivfpq, fast."),
        ({"kind": "fast", "probes": 0}, "probes must be a whole number of at least 1, got 0."),
        ({"kind": "ivfpq", "dims": 0}, "dims must be a whole number of at least 1, got 0."),
        ({"kind": "ivfpq", "dims": 2.5}, "dims must be a whole number of at least 1, got 2.5."),
        ({"kind": "fast", "dims": 100}, "dims of fast must be a multiple of 64, got 100."),
        ({"kind": "fast", "bits": 5}, "bits must be 4 or 8, got 5."),
        ({"kind": "fast", "value_bits": 16}, "value_bits must be 4 or 8, got 16."),
    ],
)
def test_a_wrong_index_setting(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        IndexConfig(**settings)


def test_an_index_is_exact_unless_named() -> None:
    assert IndexConfig().kind == "exact"
    assert RoutingConfig().index is None
    assert RoutingConfig(index="fast") == RoutingConfig(index=IndexConfig(kind="fast"))
    assert RoutingConfig(index={"kind": "ivfpq", "dims": 100}).index.dims == 100
    assert (IndexConfig(kind="ivfpq").probes, IndexConfig(kind="fast").probes) == (32, 16)


@pytest.mark.parametrize(
    "config",
    [
        IndexConfig(kind="fast", dims=128, bits=8, value_bits=4, probes=3, rerank=True),
        RoutingConfig(index="ivfpq"),
        BuildConfig(),
        BuildConfig(steps=3, learning_rate=2.5, gradient="dense", tokens="completion"),
        BuildConfig(max_length=2, batch_tokens=1),
        RoutingConfig(),
        RoutingConfig(k=4, similarity="cosine", gamma=0.5, gamma_scale=0.1, layers=(0, 3)),
        RoutingConfig(layers=(2, 1), stats=False),
    ],
    ids=repr,
)
def test_a_config_survives_json(config: BuildConfig | RoutingConfig | IndexConfig) -> None:
    again = type(config)(**json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)


@pytest.mark.parametrize("config", [BuildConfig(), RoutingConfig(), IndexConfig()], ids=repr)
def test_a_config_does_not_change(config: BuildConfig | RoutingConfig | IndexConfig) -> None:
    name = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, getattr(config, name))


@pytest.mark.parametrize(("config", "name"), [(BuildConfig, "steps"), (RoutingConfig, "k")])
def test_a_count_is_a_whole_number(config: type[Any], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} .*got 1\.5"):
        config(**{name: 1.5})
