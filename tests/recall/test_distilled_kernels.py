"""The kernels of distilled layers against DistilledRecall in plain torch.

Without a GPU, Triton's interpreter runs them (conftest.py turns it on). It multiplies no bfloat16:
tests/gpu does that on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers.kernel_layers import DEVICE, no_counts
from helpers.prototype_layers import (
    PrototypeCase,
    PrototypeLayer,
    check_counted,
    check_mixing,
    distil_by_hand,
    stack_layers,
)
from knn_moe import RoutingConfig, RoutingMemory, attach, attach_all
from knn_moe.inference.stats import RoutingStats
from knn_moe.recall import distilled, fused_prototypes, launch_prototypes
from knn_moe.recall.fused_prototypes import FusedPrototypes
from knn_moe.recall.launch_prototypes import make_plan

pytest.importorskip("triton")

CASES = [
    PrototypeCase(tokens=1, prototypes=1, experts=4, top=1),
    PrototypeCase(tokens=1, prototypes=37, experts=60, top=8),
    PrototypeCase(tokens=1, prototypes=20, experts=32, width=2880, top=4, padded=True),
    PrototypeCase(tokens=2, prototypes=37, experts=60, top=8, padded=True),
    PrototypeCase(tokens=5, prototypes=16, experts=9, width=33, top=9),
    PrototypeCase(tokens=17, prototypes=40, experts=7, width=200),
    PrototypeCase(tokens=40, prototypes=3, experts=128, top=0),
    PrototypeCase(tokens=70, prototypes=70, experts=64, top=8, padded=True),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
ROWS = torch.randint(3, 128, (3, 9), generator=torch.Generator().manual_seed(1))


@every_case
def test_mixing(case: PrototypeCase) -> None:
    layer = PrototypeLayer(case)
    check_mixing(layer, layer.fused())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (PrototypeCase(tokens=1, prototypes=21), torch.bfloat16),
        (PrototypeCase(tokens=1, prototypes=8192, experts=4, width=33), torch.float32),
        (PrototypeCase(tokens=3, prototypes=33, experts=512, top=0), torch.float32),
        (PrototypeCase(tokens=3, prototypes=2000, width=33), torch.float16),
        (PrototypeCase(tokens=1030, prototypes=140, width=64, padded=True), torch.float16),
    ],
    ids=str,
)
def test_mixing_in_other_dtypes_and_sizes(case: PrototypeCase, dtype: torch.dtype) -> None:
    layer = PrototypeLayer(case, dtype)
    check_mixing(layer, layer.fused())


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_program_that_walks_over_several_blocks(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_prototypes, "_PROGRAMS", 2)
    monkeypatch.setattr(launch_prototypes, "make_plan", make_plan.__wrapped__)
    layer = PrototypeLayer(PrototypeCase(tokens, prototypes=100))
    plan = launch_prototypes.make_plan(tokens, 100, 8, wide=True)
    assert plan.splits > 1
    assert plan.span > plan.blocks.rows
    check_mixing(layer, layer.fused())


def test_more_tokens_than_are_served_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_prototypes, "_AT_ONCE", 3)
    layer = PrototypeLayer(PrototypeCase(tokens=7, prototypes=5, padded=True))
    check_mixing(layer, layer.fused())


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("experts", [4, 64, 100, 512])
def test_plans(experts: int, wide: bool) -> None:
    """All prototypes are walked over once, and few kernels are compiled."""
    plans = set()
    for tokens in (1, 2, 16, 17, 64, 65, 300, 1000, 5000, 8192):
        for prototypes in (1, 3, 64, 1000, 1024, 8192):
            plan = make_plan(tokens, prototypes, experts, wide=wide)
            assert (plan.splits - 1) * plan.span < prototypes <= plan.splits * plan.span
            assert plan.span % plan.blocks.rows == 0
            plans |= {plan} if prototypes == 1024 else set()
    assert len(plans) <= 9


def test_no_tokens() -> None:
    layer = PrototypeLayer(PrototypeCase(tokens=0, prototypes=5))
    mixed, weight = check_mixing(layer, layer.fused())
    assert (mixed.shape, weight.shape) == ((0, 8), (0,))
    counts, calls = torch.zeros(2, 4, dtype=torch.int64), torch.tensor([0, 1])
    slots = torch.zeros(0, dtype=torch.int32)
    stack_layers([layer, layer])(layer.inputs, layer.logits, counts, None, slots, calls)
    assert counts.tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("tokens", [1, 3])
def test_inputs_that_are_prototypes(tokens: int) -> None:
    """Their distance may be below 0 by rounding, and no similarity is above 1."""
    layer = PrototypeLayer(PrototypeCase(tokens, prototypes=3))
    near = layer.recall.factors[8:] + layer.recall.centre
    layer.inputs = near[:tokens].clone()
    layer.recall.gamma *= 100
    check_mixing(layer, layer.fused())


@pytest.mark.parametrize("tokens", [1, 3])
def test_tokens_far_from_everything_keep_their_logits(tokens: int) -> None:
    layer = PrototypeLayer(PrototypeCase(tokens, prototypes=5), torch.float16)
    layer.inputs = 100 * layer.inputs
    mixed, weight = layer.fused()(layer.inputs, layer.logits, no_counts(), None)
    assert weight.eq(0).all()
    assert torch.equal(mixed, layer.logits)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, about NaN
def test_a_token_that_is_not_a_number_does_not_affect_others() -> None:
    layer = PrototypeLayer(PrototypeCase(tokens=3, prototypes=5))
    expected, _ = layer.expected()
    layer.inputs[1] = float("nan")
    mixed, _ = layer.fused()(layer.inputs, layer.logits, no_counts(), None)
    torch.testing.assert_close(mixed[[0, 2]], expected[[0, 2]], rtol=1e-4, atol=1e-4)


def test_inputs_that_are_not_contiguous_and_logits_that_are_not_aligned() -> None:
    layer = PrototypeLayer(PrototypeCase(tokens=3, prototypes=5))
    layer.inputs = layer.inputs.T.contiguous().T
    logits = torch.cat([layer.logits.new_zeros(1), layer.logits.flatten()])
    layer.logits = logits[1:].view(3, -1)
    check_mixing(layer, layer.fused())


# Several memories


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tokens", [1, 6, 70])
def test_each_token_by_its_own_memory(tokens: int, padded: bool) -> None:
    sizes = 5, 70, 16
    layers = [PrototypeLayer(PrototypeCase(tokens, size)) for size in sizes]
    fused = stack_layers(layers)
    slots = (torch.arange(tokens, device=DEVICE) * 5 % 4 - 1).to(torch.int32)
    real = torch.arange(tokens, device=DEVICE) % 5 > 0 if padded else None
    inputs, logits = layers[1].inputs, layers[1].logits
    calls = torch.tensor([1, 1, 0], device=DEVICE)
    slots[slots == 2] = -1
    counts = torch.zeros(3, 4, dtype=torch.int64, device=DEVICE)
    mixed, weight = fused(inputs, logits, counts, real, slots, calls)
    nobody = slots == -1
    assert nobody.any()
    assert torch.equal(mixed[nobody], logits[nobody])
    assert weight[nobody].eq(0).all()
    assert counts[2].tolist() == [0, 0, 0, 0]
    for slot in (0, 1):
        mine, layer = slots == slot, layers[slot]
        alone = layer.fused()(inputs, logits, no_counts(), None)
        torch.testing.assert_close(mixed[mine], alone[0][mine], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weight[mine], alone[1][mine], rtol=1e-5, atol=1e-5)
        layer.logits = logits
        check_counted(counts[slot], layer, mixed, weight, mine if real is None else mine & real)


def test_a_stack_s_memories_share_its_data() -> None:
    layers = [PrototypeLayer(PrototypeCase(tokens=2, prototypes=size)) for size in (5, 9)]
    stacked = stack_layers(layers).tensors
    for slot, layer in enumerate(layers):
        expected, part = layer.expected(), stacked.of_memory(slot)
        for one, other in zip(part, layer.tensors(), strict=True):
            assert torch.equal(one, other)
        layer.recall.share(part)
        assert layer.recall.factors.data_ptr() == stacked.factors[slot].data_ptr()
        assert torch.equal(layer.expected()[0], expected[0])


# Compiled


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.usefixtures("compiled_state")
def test_compiled_code_recalls_the_same(backend: str) -> None:
    layer = PrototypeLayer(PrototypeCase(tokens=2, prototypes=5, padded=True))
    fused = layer.fused()
    expected = fused(layer.inputs, layer.logits, no_counts(), layer.real)
    mixed, weight = check_mixing(layer, torch.compile(fused, backend=backend, fullgraph=True))
    assert torch.equal(mixed, expected[0])
    assert torch.equal(weight, expected[1])


@pytest.mark.slow
def test_the_operator_for_compiled_graphs() -> None:
    layers = [PrototypeLayer(PrototypeCase(tokens=2, prototypes=5)) for _ in range(2)]
    tensors, counts = list(stack_layers(layers).tensors), torch.zeros(2, 4, dtype=torch.int64)
    slots, calls = torch.tensor([0, -1], dtype=torch.int32), torch.tensor([1, 0])
    logits = layers[0].logits.T.contiguous().T
    arguments = layers[0].inputs, logits, counts, None, slots, calls, tensors, 2
    torch.library.opcheck(torch.ops.knn_moe.recall_prototypes, arguments)


# On a model


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Use the kernels here too; collects whether each call of them had slots."""
    calls: list[bool] = []
    forward = FusedPrototypes.forward

    def noted(fused: FusedPrototypes, *arguments: Tensor | None) -> tuple[Tensor, Tensor]:
        calls.append(len(arguments) > 4)
        return forward(fused, *arguments)

    monkeypatch.setattr(distilled, "kernels_usable", lambda device: True)
    monkeypatch.setattr(FusedPrototypes, "forward", noted)
    return calls


@torch.no_grad()
def read(model: PreTrainedModel, mask: Tensor | None = None) -> Tensor:
    logits: Tensor = model(ROWS, attention_mask=mask, use_cache=False).logits
    return logits


def check_same_stats(found: RoutingStats, expected: RoutingStats) -> None:
    """But for rounding of λ."""
    for layer, stats in expected.items():
        assert (found[layer].calls, found[layer].tokens) == (stats.calls, stats.tokens)
        assert found[layer].changed == pytest.approx(stats.changed)
        assert found[layer].mean_confidence == pytest.approx(stats.mean_confidence, rel=1e-3)


def test_where_kernels_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fused_prototypes.kernels_usable(torch.device("cpu"))
    assert fused_prototypes.kernels_usable(torch.device("cuda"))
    monkeypatch.setattr(fused_prototypes, "has_triton", lambda: False)
    assert not fused_prototypes.kernels_usable(torch.device("cuda"))


@pytest.mark.slow
def test_attached(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, with_kernels: list[bool]
) -> None:
    memory = distil_by_hand(zoo_memory, 12)
    mask = torch.ones_like(ROWS)
    mask[1, :4] = 0
    own = read(zoo_olmoe, mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distilled, "kernels_usable", lambda device: False)
        plain = attach(zoo_olmoe, memory)
    with plain:
        expected = read(zoo_olmoe, mask)
    assert with_kernels == []
    with attach(zoo_olmoe, memory) as routing:
        found = read(zoo_olmoe, mask)
    check_same_stats(routing.stats(), plain.stats())
    assert with_kernels == [False] * len(memory.layers)
    real = mask.bool()
    assert not torch.allclose(own[real], expected[real], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found[real], expected[real], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_gradients_flow_through_plain_torch(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, with_kernels: list[bool]
) -> None:
    memory = distil_by_hand(zoo_memory, 12)
    with attach(zoo_olmoe, memory) as routing:
        logits = zoo_olmoe(ROWS, use_cache=False).logits
        assert with_kernels == []
        torch.testing.assert_close(read(zoo_olmoe), logits, rtol=1e-3, atol=1e-3)
        assert with_kernels == [False] * len(memory.layers)
        assert {layer.calls for layer in routing.stats().values()} == {2}
        assert {layer.tokens for layer in routing.stats().values()} == {2 * ROWS.numel()}


@pytest.mark.slow
@pytest.mark.parametrize("spare_first", [False, True])
def test_several_on_a_model(
    spare_first: bool,
    zoo_olmoe: PreTrainedModel,
    zoo_memory: RoutingMemory,
    with_kernels: list[bool],
) -> None:
    """One launch for all where rows differ, and otherwise as one after the other."""
    names = "law", "medicine", "art"
    memories = {name: distil_by_hand(zoo_memory, 4 + seed, seed) for seed, name in enumerate(names)}
    config = RoutingConfig(spare_first_token=spare_first)
    configs = dict.fromkeys(names, config) | {"law": replace(config, confidence_factor=0.5)}
    choices = ["law", None, "medicine"], ["art"] * 3, [None, None, "art"], None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distilled, "kernels_usable", lambda device: False)
        plain = attach_all(zoo_olmoe, memories, configs)
    expected = []
    with plain:
        for choice in choices:
            with plain.using(choice):
                expected.append(read(zoo_olmoe))
    own = read(zoo_olmoe)
    with attach_all(zoo_olmoe, memories, configs) as routing:
        for choice, logits in zip(choices, expected, strict=True):
            with routing.using(choice):
                torch.testing.assert_close(read(zoo_olmoe), logits, rtol=1e-3, atol=1e-3)
        for name in names:
            check_same_stats(routing.stats()[name], plain.stats()[name])
        with routing.using(["law", None, "medicine"]):
            torch.testing.assert_close(read(zoo_olmoe)[1], own[1])
        with_kernels.clear()
        routing.explain("law", ROWS[0])
        assert not any(with_kernels)
        with_kernels.clear()
        with routing.using(["law", None, "law"]):
            read(zoo_olmoe)
    assert with_kernels == [True] * len(zoo_memory.layers)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_state")
def test_several_on_a_compiled_model(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice is no constant of the graph."""
    monkeypatch.setattr(distilled, "kernels_usable", lambda device: True)
    memories = {name: distil_by_hand(zoo_memory, 6, len(name)) for name in ("law", "medicine")}
    choices = ["law", None, "medicine"], "law", ["medicine", "law", None], ["law", "law", None]
    with attach_all(zoo_olmoe, memories) as routing:
        expected = []
        for choice in choices:
            with routing.using(choice):
                expected.append(read(zoo_olmoe))
        before = routing.stats()
        compiled = torch.compile(zoo_olmoe, backend="eager")
        for choice, logits in zip(choices, expected, strict=True):
            with routing.using(choice), torch.no_grad():
                found = compiled(ROWS, use_cache=False).logits
            torch.testing.assert_close(found, logits)
        for name, layers in routing.stats().items():
            for layer, stats in layers.items():
                assert stats.calls == 2 * before[name][layer].calls
                assert stats.tokens == 2 * before[name][layer].tokens
