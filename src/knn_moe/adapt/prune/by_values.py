"""What each case is worth by what the memory alone says, without the model it is for.

A router's own logits are linear in its input, and a value is such logits moved down the slope of
its token's loss. So a linear fit of the values to the keys is about the router, and a value less
that fit is about minus the slope: all that by_loss.py asks the model for. Each case is looked up
like a new token, its own example left out; what it recalls is worth λ w_i ⟨v - r, v_i - r⟩ to it, v
being its value and r the fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from knn_moe.adapt.prune.recalled import Layer, Sums
from knn_moe.memory.memory import LayerMemory

_ROWS: Final = 4096  # cases looked at at a time
_RIDGE: Final = 1e-6  # of the keys' mean variance: keys may lie in a plane


def worth_by_values(
    whole: Mapping[int, Layer],
    left: Mapping[int, Layer],
    device: torch.device,
    on_step: Callable[[], None] = lambda: None,
) -> Tensor:
    """Of the cases `left`, to those of the `whole` memory: in shares of how far a layer's values
    were moved, summed over layers. Shape [M] fp64."""
    worth = torch.zeros(len(next(iter(left.values())).owner), dtype=torch.float64)
    for index, asking in whole.items():
        router = FittedRouter(asking.memory, device)
        sums, moved = Sums(len(worth)), 0.0
        for rows, keys, values in _parts(asking.memory, device):
            own = router.logits(keys)
            slope = own - values
            found = left[index].recall(keys, asking.owner[rows])
            sums.add(found.rows, found.brought(slope, own) * found.confidence_factor[:, None])
            moved += float(slope.square().sum())
        worth += sums.total / (moved or 1.0)
        on_step()
    return worth


class FittedRouter:
    """The linear map that foretells a layer's values best. Block by block, in fp32 about the mean,
    summed in fp64. Shapes: weight [d, N]; key [d] and value [N], the means; fp32."""

    def __init__(self, memory: LayerMemory, device: torch.device) -> None:
        key, value = (torch.zeros(size, dtype=torch.float64) for size in memory.shape[:2])
        for _, keys, values in _parts(memory, device):
            key += keys.float().sum(dim=0).double().cpu() / len(memory)
            value += values.sum(dim=0).double().cpu() / len(memory)
        self.key, self.value = key.float().to(device), value.float().to(device)
        square = torch.zeros(len(key), len(key), dtype=torch.float64)
        across = torch.zeros(len(key), len(value), dtype=torch.float64)
        for _, keys, values in _parts(memory, device):
            centred = keys.float() - self.key
            square += (centred.T @ centred).double().cpu()
            across += (centred.T @ (values - self.value)).double().cpu()
        ridge = _RIDGE * float(square.diagonal().mean()) or 1.0
        square.diagonal().add_(ridge)
        self.weight = torch.linalg.solve(square, across).float().to(device)

    def logits(self, keys: Tensor) -> Tensor:
        """Shapes: [T, d] → [T, N] fp32."""
        return torch.addmm(self.value, keys.float() - self.key, self.weight)


def _parts(memory: LayerMemory, device: torch.device) -> Iterator[tuple[slice, Tensor, Tensor]]:
    for start in range(0, len(memory), _ROWS):
        rows = slice(start, start + _ROWS)
        yield rows, memory.keys[rows].to(device), memory.values[rows].to(device)
