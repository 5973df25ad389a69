"""Slots answer each token as its own distilled memory does alone; graphs see what is loaded later.

These tests need no vLLM: TRITON_INTERPRET=1 pytest --noconftest tests/test_slots.py. Without a GPU,
Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from knn_moe import RoutingConfig
from knn_moe.memory.distilled import DistilledLayer
from knn_moe.recall.distilled import DistilledRecall

from knn_moe_vllm import slots as slots_module
from knn_moe_vllm.placed import Placed
from knn_moe_vllm.slots import Slots

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, EXPERTS, TOKENS, LAYERS = 64, 8, 32, (0, 1)


def make_slots(count: int = 2) -> Slots:
    routers: list[Any] = [
        SimpleNamespace(layer=layer, device=DEVICE, hidden_size=WIDTH, num_experts=EXPERTS)
        for layer in LAYERS
    ]
    return Slots(routers, count, prototypes=30, tokens=TOKENS, dtype=torch.float32)


def make_memory(seed: int, prototypes: int, layers: tuple[int, ...] = LAYERS) -> Placed:
    torch.manual_seed(seed)
    recalls: dict[int, Any] = {}
    for layer in layers:
        distilled = DistilledLayer(
            keys=torch.randn(prototypes, WIDTH),
            updates=torch.randn(prototypes, EXPERTS),
            linear=0.1 * torch.randn(EXPERTS, WIDTH),
            cases=torch.arange(prototypes),
            gamma=0.02,
            log_threshold=-1.0,
        )
        recalls[layer] = DistilledRecall(distilled, RoutingConfig(), 0.9, DEVICE)
    return Placed(recalls, spares_first=seed % 2 == 0)


def check(slots: Slots, memories: dict[int, Placed], numbers: torch.Tensor, replay: Any) -> None:
    """Compare with each memory alone."""
    torch.manual_seed(5)
    x = torch.randn(TOKENS, WIDTH, device=DEVICE)
    logits = torch.randn(TOKENS, EXPERTS, device=DEVICE)
    positions = torch.arange(TOKENS, device=DEVICE) % 5
    slots.assign(numbers, memories)
    for layer in LAYERS:
        mixed = replay(layer, x, logits, positions)
        for number in numbers.unique().tolist():
            mine = (numbers == number).to(DEVICE)
            placed = memories.get(number)
            if placed is None or layer not in placed.recalls:
                assert torch.equal(mixed[mine], logits[mine])
                continue
            alone = placed.mix(layer, x[mine], logits[mine], positions[mine])
            torch.testing.assert_close(mixed[mine], alone, rtol=1e-3, atol=1e-4)
            assert not torch.equal(mixed[mine], logits[mine])


@pytest.mark.parametrize("kernels", [False, True])
def test_each_token_is_answered_by_its_own_memory(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels and DEVICE.type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Kernels run on a GPU or in Triton's interpreter.")
    monkeypatch.setattr(slots_module, "kernels_usable", lambda device: kernels)
    memories = {1: make_memory(1, 30), 2: make_memory(2, 7), 3: make_memory(3, 16, layers=(1,))}
    slots = make_slots()
    for first, second in ((1, 2), (3, 1), (2, 3), (2, 2)):  # one goes out for another
        numbers = torch.tensor([0, first, second, 9])[torch.arange(TOKENS) % 4]
        check(slots, memories, numbers, slots.mix)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs need a GPU")
def test_a_recorded_graph_reads_what_is_loaded_later() -> None:
    slots = make_slots()
    x = torch.randn(TOKENS, WIDTH, device=DEVICE)
    logits = torch.randn(TOKENS, EXPERTS, device=DEVICE)
    positions = torch.ones(TOKENS, dtype=torch.int64, device=DEVICE)
    graphs, outputs = {}, {}
    for layer in LAYERS:
        for _ in range(2):
            slots.mix(layer, x, logits, positions)
        torch.cuda.synchronize()
        graphs[layer] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[layer]):
            outputs[layer] = slots.mix(layer, x, logits, positions)

    def replay(layer: int, given: Any, own: Any, at: Any) -> torch.Tensor:
        x.copy_(given)
        logits.copy_(own)
        positions.copy_(at)
        graphs[layer].replay()
        torch.cuda.synchronize()
        return outputs[layer]

    memories = {1: make_memory(1, 30), 2: make_memory(2, 7), 3: make_memory(3, 16, layers=(1,))}
    for first, second in ((1, 2), (3, 1), (2, 3)):
        numbers = torch.tensor([0, first, second, 9])[torch.arange(TOKENS) % 4]
        check(slots, memories, numbers, replay)
