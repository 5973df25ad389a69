"""Find layers that must not be rerouted.

A pretrained model keeps a huge activation at a text's first token, on which attention rests where
it has nothing to attend to. A few experts of one layer make it ("super experts"). A first token
that misses one of them ruins all tokens after it, and no gradient shows this before it happens. So
each layer is rerouted alone, by a little: one that makes the model clearly worse is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import nn

from knn_moe.adapt.calibrate.fit import FitData
from knn_moe.adapt.calibrate.start import Direction, measure_loss

_DISTANCE: Final = 0.1  # relative to the spread of the layer's logits, as in start.py
_HARM: Final = 0.02  # share of the loss per token that a layer may add


def find_fragile_layers(
    model: nn.Module, directions: Sequence[Direction], data: FitData, k: int
) -> list[int]:
    """Return the layers that make the model clearly worse when they alone recall.

    Args:
        model: The model alone.
        directions: The cases of each layer.
        data: Batches and neighbours.
        k: How many neighbours are recalled.
    """
    most = measure_loss(model, [], FitData(data.batches, []), k) * (1 + _HARM)
    fragile = []
    for direction, table in zip(directions, data.tables, strict=True):
        alone = FitData(data.batches, [table])
        if not measure_loss(model, [direction.at(_DISTANCE)], alone, k) <= most:
            fragile.append(direction.cases.router.layer)
    return fragile
