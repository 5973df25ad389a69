"""The kernels of distilled memories on a real GPU: in every dtype, at real sizes, on models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers.kernel_layers import CUDA, DEVICE, no_counts
from helpers.points import DTYPES
from helpers.prototype_layers import (
    PrototypeCase,
    PrototypeLayer,
    check_counted,
    check_mixing,
    distil_by_hand,
    stack_layers,
)
from helpers.zoo import BUILD, family, make_texts
from knn_moe import RoutingMemory, attach, attach_all, build_memory
from knn_moe.recall.distilled import DistilledRecall

pytestmark = [
    pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU"),
    # What the compiler has to say of the GPU and of its own passes.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
NAMES = ("medicine", "law", "art", "code")
CASES = [
    PrototypeCase(tokens, prototypes, experts, width, top=min(experts, 8), padded=tokens % 2 > 0)
    for prototypes, experts, width in [
        (1024, 64, 2048), (1000, 128, 2048), (777, 32, 2880), (1, 4, 192), (8192, 60, 512),
    ]
    for tokens in (1, 2, 16, 17, 64, 65, 700, 8192, 9001)
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_mixing(case: PrototypeCase, dtype: torch.dtype) -> None:
    layer = PrototypeLayer(case, dtype)
    fused = layer.fused()
    mixed, weight = check_mixing(layer, fused)
    for _ in range(3):
        again = fused(layer.inputs, layer.logits, no_counts(), layer.real)
        assert torch.equal(again[0], mixed)
        assert torch.equal(again[1], weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 20, 300, 8192])
@pytest.mark.parametrize("experts", [256, 512])
def test_many_experts(experts: int, tokens: int, dtype: torch.dtype) -> None:
    """Their changes are not counted by the kernels."""
    layer = PrototypeLayer(PrototypeCase(tokens, 1000, experts, 2048, top=0), dtype)
    check_mixing(layer, layer.fused())


@pytest.mark.parametrize("tokens", [1, 5, 300])
@pytest.mark.usefixtures("compiled_state")
def test_compiled_code_recalls_the_same(tokens: int) -> None:
    layer = PrototypeLayer(PrototypeCase(tokens, 200, 60, padded=True), torch.bfloat16)
    check_mixing(layer, torch.compile(layer.fused(), fullgraph=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 64, 3000])
def test_each_token_by_its_own_memory(tokens: int, dtype: torch.dtype) -> None:
    sizes = 1024, 500, 64, 8
    layers = [PrototypeLayer(PrototypeCase(tokens, size, 64, 2048, 8), dtype) for size in sizes]
    slots = (torch.arange(tokens, device=DEVICE) * 7 % 5 - 1).to(torch.int32)
    counts = torch.zeros(4, 4, dtype=torch.int64, device=DEVICE)
    inputs, logits = layers[0].inputs, layers[0].logits
    calls = torch.ones(4, dtype=torch.int64, device=DEVICE)
    mixed, weight = stack_layers(layers)(inputs, logits, counts, None, slots, calls)
    assert torch.equal(mixed[slots < 0], logits[slots < 0])
    assert weight[slots < 0].eq(0).all()
    rounding = max(5e-4, 2 * torch.finfo(dtype).eps)
    for slot, layer in enumerate(layers):
        mine = slots == slot
        layer.inputs, layer.logits = inputs, logits
        expected, expected_weight = layer.expected()
        assert (
            (mixed[mine].float() - expected[mine])
            .abs()
            .le(rounding * (1 + expected[mine].abs()))
            .all()
        )
        torch.testing.assert_close(weight[mine], expected_weight[mine], rtol=2e-4, atol=2e-4)
        check_counted(counts[slot], layer, mixed, weight, mine)


# On models


@pytest.fixture
def model() -> PreTrainedModel:
    return family("olmoe").to("cuda", torch.bfloat16)


@pytest.fixture
def memories(model: PreTrainedModel, zoo_tokenizer: object) -> dict[str, RoutingMemory]:
    whole = build_memory(model, zoo_tokenizer, make_texts(12), BUILD)
    return {name: distil_by_hand(whole, 10 + seed, seed) for seed, name in enumerate(NAMES)}


@torch.no_grad()
def read(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids, use_cache=False).logits
    return logits.clone()


def near(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() < 5e-2 * expected.norm())


def test_kernels_are_used_and_counted(
    model: PreTrainedModel, memories: dict[str, RoutingMemory]
) -> None:
    ids = torch.randint(3, 128, (2, 11), device="cuda")
    own = read(model, ids)
    with attach(model, memories["law"]) as routing:
        for hook in routing.recall_hooks():
            assert isinstance(hook.recall, DistilledRecall)
            assert hook.recall.fused is not None
            assert hook.recall.counts_changes
        kernels = read(model, ids)
        stats = dict(routing.stats())
    with attach(model, memories["law"]) as routing:
        for hook in routing.recall_hooks():
            hook.recall.fused = None
        plain = read(model, ids)
        for layer, expected in routing.stats().items():
            assert (stats[layer].calls, stats[layer].tokens) == (1, 22)
            assert stats[layer].mean_confidence == pytest.approx(expected.mean_confidence, rel=0.05)
            assert stats[layer].changed is not None
    assert not near(own, plain)
    assert near(kernels, plain)


@pytest.mark.usefixtures("compiled_state")
def test_cuda_graphs(model: PreTrainedModel, memories: dict[str, RoutingMemory]) -> None:
    """The same numbers, and no graph is given up for our sake."""
    from torch._dynamo.utils import counters

    batches = [torch.randint(3, 128, (2, 11), device="cuda") for _ in range(4)]
    counters.clear()
    with attach(model, memories["law"]) as routing:
        expected = [read(model, ids) for ids in batches]
        compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        for ids, logits in zip(batches, expected, strict=True):
            assert near(read(compiled, ids), logits)
        assert routing.stats()[0].calls == 8
        assert routing.stats()[0].tokens == 8 * 22
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_four_memories_on_different_rows(
    model: PreTrainedModel, memories: dict[str, RoutingMemory]
) -> None:
    ids = torch.randint(3, 128, (5, 9), device="cuda")
    rows = [*NAMES, None]
    alone = {None: read(model, ids)}
    for name in NAMES:
        with attach(model, memories[name]):
            alone[name] = read(model, ids)
    with attach_all(model, memories) as routing:
        with routing.using(rows):
            together = read(model, ids)
        stats = routing.stats()
    for row, name in enumerate(rows):
        assert near(together[row], alone[name][row])
    assert not near(alone["law"], alone[None])
    assert {layer.calls for one in stats.values() for layer in one.values()} == {1}
    assert {layer.tokens for one in stats.values() for layer in one.values()} == {9}


@pytest.mark.usefixtures("compiled_state")
def test_four_memories_in_compiled_code(
    model: PreTrainedModel, memories: dict[str, RoutingMemory]
) -> None:
    """The choice is no constant of the graph."""
    ids = torch.randint(3, 128, (4, 9), device="cuda")
    choices = [*NAMES], ["law", None, "art", "law"], "code", [*reversed(NAMES)]
    with attach_all(model, memories) as routing:
        expected = []
        for choice in choices:
            with routing.using(choice):
                expected.append(read(model, ids))
        compiled = torch.compile(model, mode="reduce-overhead")
        for choice, logits in zip(choices, expected, strict=True):
            with routing.using(choice):
                for _ in range(3):
                    assert near(read(compiled, ids), logits)
        assert routing.stats()["art"][0].calls == 3 * 4
        assert routing.stats()["code"][0].tokens == 4 * (9 + 36 + 9)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("tokens", [1, 300])
def test_on_a_gpu_that_is_not_the_current_one(tokens: int) -> None:
    layer = PrototypeLayer(PrototypeCase(tokens, 200, 64), torch.bfloat16)
    fused = layer.fused().to("cuda:1")
    there = type(fused)(fused.tensors, fused.top)
    mixed, _ = there(
        layer.inputs.to("cuda:1"), layer.logits.to("cuda:1"), no_counts().to("cuda:1"), None
    )
    expected, _ = layer.fused()(layer.inputs, layer.logits, no_counts(), None)
    assert torch.equal(mixed.to(expected.device), expected)
