"""What is refused before a model runs, and what a process with some of the layers checks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from knn_moe import RoutingMemory, find_routers
from knn_moe.errors import (
    AttachError,
    ConfigError,
    MemoryMismatchError,
    RouterNotCalledError,
    UnsupportedModelError,
)
from torch import nn

from compare import Reference
from knn_moe_vllm import loading
from knn_moe_vllm.gate import RouterWeights
from knn_moe_vllm.settings import Settings, read_settings
from knn_moe_vllm.store import Store


def make_store(olmoe: Reference, layers: range, *, all_here: bool) -> Store:
    """Return the store of a process that has these layers of the model."""
    store = Store()
    with store.making_model(all_here=all_here):
        for router in find_routers(olmoe.model)[layers.start : layers.stop]:
            gate = SimpleNamespace(
                router_name=router.name,
                output_size=router.num_experts,
                input_size=router.hidden_size,
                loaded=RouterWeights(router.module),
            )
            store.add_gate(gate)
    return store


@pytest.mark.parametrize("layers", [range(3), range(3, 6)])
def test_a_process_of_a_pipeline_checks_its_own_layers(olmoe: Reference, layers: range) -> None:
    store = make_store(olmoe, layers, all_here=False)
    placed = store.place(str(olmoe.memories["A"]))
    assert list(placed.recalls) == list(layers)


@pytest.mark.parametrize("digests", ["wrong", "none"])
def test_a_memory_that_no_layer_tells_is_refused(
    olmoe: Reference, digests: str, tmp_path: Any
) -> None:
    opened = RoutingMemory.from_pretrained(olmoe.memories["A"])
    own = opened.manifest.router_digests or {}
    changed = {**own, "4": "0" * 64} if digests == "wrong" else None
    manifest = replace(opened.manifest, router_digests=changed)
    folder = tmp_path / "memory"
    replace(opened, manifest=manifest).save_pretrained(folder)
    message = r"\(layer 4 differs\)" if digests == "wrong" else "kept no digest of each layer"
    with pytest.raises(MemoryMismatchError, match=message):
        make_store(olmoe, range(3, 6), all_here=False).place(str(folder))
    # Where all layers are, the fingerprint of the whole tells.
    assert len(make_store(olmoe, range(6), all_here=True).place(str(folder)).recalls) == 6


def test_a_router_that_is_never_called_is_refused(olmoe: Reference) -> None:
    store = make_store(olmoe, range(6), all_here=True)
    store.begin(torch.arange(2))
    for layer in range(5):
        store.mix_(torch.zeros(2, 192), torch.zeros(2, 16), layer)
    with pytest.raises(RouterNotCalledError, match="without calling the router of layer 5"):
        store.place(str(olmoe.memories["A"]))


def test_a_memory_that_did_nothing_in_its_first_pass_is_told(olmoe: Reference) -> None:
    store = make_store(olmoe, range(6), all_here=True)
    store.usual = store.place(str(olmoe.memories["A"]))
    store.begin(torch.arange(2))
    with pytest.raises(RouterNotCalledError, match="without calling the router of layer 0"):
        store.begin(torch.arange(2))


def test_a_router_that_sees_a_part_of_the_batch_is_told(olmoe: Reference) -> None:
    store = make_store(olmoe, range(6), all_here=True)
    store.usual = store.place(str(olmoe.memories["A"]))
    store.begin(torch.arange(4))
    with pytest.raises(AttachError, match="got 2 tokens in a pass of 4"):
        store.mix_(torch.zeros(2, 192), torch.zeros(2, 16), 0)


def test_a_model_without_routers_is_refused(olmoe: Reference) -> None:
    with pytest.raises(UnsupportedModelError, match="no router that memories can reach"):
        make_store(olmoe, range(0), all_here=True).place(str(olmoe.memories["A"]))


def test_a_layer_has_one_router(olmoe: Reference) -> None:
    store = make_store(olmoe, range(1), all_here=True)
    with pytest.raises(UnsupportedModelError, match="Layer 0 has two routers"):
        store.add_gate(SimpleNamespace(router_name="draft.layers.0.mlp.gate"))


def test_a_router_that_vllm_goes_around_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gate = nn.Sequential(nn.Module()), nn.Linear(2, 2)
    model[0].gate, model[0]._fse_fuse_gate = gate, True
    monkeypatch.setattr(loading.STORE, "gates", {0: gate})
    with pytest.raises(UnsupportedModelError, match="never calls the router of '0'"):
        loading._check_model(model)


def configured(knn_moe: Any, **parallel: Any) -> SimpleNamespace:
    """Return vLLM's configuration, as far as the plugin reads it."""
    return SimpleNamespace(
        additional_config={} if knn_moe is None else {"knn_moe": knn_moe},
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=parallel.pop("fast", False)),
    )


def test_settings() -> None:
    assert read_settings(configured(None, use_ubatching=True)) is None
    assert read_settings(configured({})) == Settings(memory=None)
    assert read_settings(configured({"memory": "here"})) == Settings(memory="here")


@pytest.mark.parametrize(
    ("given", "parallel", "message"),
    [
        (["here"], {}, "must be an object"),
        ({"memmory": "here"}, {}, "memmory.*Did you mean 'memory'"),
        ({"memory": 3}, {}, "must be the folder of a memory"),
        ({}, {"use_sequence_parallel_moe": True}, "With sequence-parallel MoE a router sees only"),
        ({}, {"use_ubatching": True}, "With microbatches a router sees only"),
        ({"prototypes": 0}, {}, "must be a whole number from 1 on"),
        ({}, {"fast": True}, "With fast prefill the last routers see only"),
    ],
)
def test_settings_that_cannot_be(given: Any, parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings(configured(given, **parallel))
