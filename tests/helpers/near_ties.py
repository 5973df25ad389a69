"""Refuse data whose result depends on how a CPU rounds.

A kNN result jumps where two cases are equally near, or two experts equally likely. Two
computations of one result (padded and not, compiled and not, batched and not) round differently,
and which of the two they take then depends on the CPU. A test that compares two computations
calls `assert_no_near_ties` on its data first: it fails because of its data, on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from knn_moe import RoutingConfig, RoutingMemory, attach
from knn_moe.recall.layer import RouterCall

MARGIN = 5e-5  # relative gap; rounding moves the numbers by about a millionth


@torch.no_grad()
def assert_no_near_ties(
    model: nn.Module,
    memory: RoutingMemory,
    ids: Tensor,
    config: RoutingConfig | None = None,
) -> None:
    """Assert that each token's neighbours and experts are clearly the nearest and the likeliest.

    Args:
        model: The model that the memory belongs to, with nothing attached.
        memory: The memory whose cases are recalled.
        ids: The tokens that the test reads, none of them padding. Shape [B, T].
        config: How they are recalled; None: as the memory says.
    """
    config = config or memory.routing
    calls: list[RouterCall] = []
    with attach(model, memory, config) as routing, routing.observed(calls.append):
        model(ids, use_cache=False)
    for call in calls:
        counts = [call.recall.k]
        if config.head is not None and call.layer == max(memory.layers):
            counts.append(config.head.k)
        for k in counts:
            distance = call.recall.nearest_of(call.inputs, k + 1).squared_distance
            _assert_apart(f"layer {call.layer}: neighbours {k} and {k + 1}", distance, k)
        logits = call.mixed.float()
        ranked = logits.sort(dim=-1, descending=True).values
        chosen = call.after.shape[-1]
        name = f"layer {call.layer}: experts {chosen} and {chosen + 1}"
        _assert_apart(name, ranked[:, :1] - ranked, chosen)


def choose_without_near_ties(
    model: nn.Module,
    memory: RoutingMemory,
    candidates: Iterable[Tensor],
    config: RoutingConfig | None = None,
) -> Tensor:
    """Return the first of `candidates` [B, T] without near ties.

    For models that a test trains: their weights themselves depend on how a CPU rounds.
    """
    for ids in candidates:
        try:
            assert_no_near_ties(model, memory, ids, config)
        except AssertionError:
            continue
        return ids
    raise AssertionError("Every candidate has a near tie. Take other data.")


def _assert_apart(name: str, ascending: Tensor, k: int) -> None:
    """Assert a gap behind the first `k` of each row. Shape: ascending [T, n], at least 0."""
    if ascending.shape[-1] <= k:
        return
    gap = ascending[:, k] - ascending[:, k - 1]
    relative = gap / ascending[:, k].clamp(min=torch.finfo(gap.dtype).tiny)
    worst = int(relative.argmin())
    assert relative[worst] > MARGIN, (
        f"Near tie in the test's data at token {worst}, {name}: {float(ascending[worst, k - 1])} "
        f"and {float(ascending[worst, k])}. Take other data."
    )


@torch.no_grad()
def is_steady(model: nn.Module, ids: Tensor) -> bool:
    """Tell whether rounding leaves the model's logits as they are. Shapes: ids [B, T].

    Weights are moved by more than rounding moves numbers: at a tie of two experts, or at a
    threshold of the gating, some logits then jump.
    """
    expected = model(ids, use_cache=False).logits
    generator = torch.Generator().manual_seed(0)
    moved = [weight for weight in model.parameters() if weight.dtype.is_floating_point]
    before = [weight.clone() for weight in moved]
    steady = True
    for _ in range(4):
        for weight, own in zip(moved, before, strict=True):
            weight.copy_(own * (1 + 2e-6 * torch.randn(own.shape, generator=generator)))
        change = model(ids, use_cache=False).logits - expected
        steady = steady and float(change.abs().max()) < 2e-3
    for weight, own in zip(moved, before, strict=True):
        weight.copy_(own)
    return steady
