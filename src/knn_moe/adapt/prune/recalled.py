"""What a case brings to those who recall it, to first order: one sum for every case.

A token that recalls cases i with weights w_i gets the proposal Σ w_i v_i. Moving it changes some
loss by its slope there, so that case i brings the token -⟨slope, w_i (v_i - what it would have had
without)⟩. Knows tensors and layers; not whose loss it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from knn_moe.equations.mixing import confidence, neighbour_weights
from knn_moe.equations.similarity import Similarity
from knn_moe.index.leave_one_out import search_leaving_out
from knn_moe.memory.memory import LayerMemory
from knn_moe.recall.recall import Widths


class Recalled(NamedTuple):
    """Of T tokens, K cases each. Shapes: rows [T, K] where the memory is; values [T, K, N];
    weight [T, K], each case's share of the proposal; confidence_factor [T], λ."""

    rows: Tensor
    values: Tensor
    weight: Tensor
    confidence_factor: Tensor

    @property
    def proposal(self) -> Tensor:
        return (self.weight[:, :, None] * self.values).sum(dim=1)

    def brought(self, slope: Tensor, without: Tensor) -> Tensor:
        """What each case brings each token, λ left out: how much lower its loss is for it.

        Shapes: slope, of the loss in the proposal [T, N]; without [T, N] → [T, K].
        """
        return -((self.values - without[:, None]) * slope[:, None]).sum(dim=-1) * self.weight


@dataclass(frozen=True)
class Layer:
    """One layer's cases as routing recalls them, those of a token's own example left out.

    Keys and values may be mapped files: a block of keys is read at a time, and the values of the
    cases found. Shapes: owner [M] int64, the example of each case; ratio [M], as LayerRecall's.
    """

    memory: LayerMemory
    owner: Tensor
    widths: Widths
    similarity: Similarity
    k: int
    ratio: Tensor | None = None

    def recall(self, inputs: Tensor, owner: Tensor) -> Recalled:
        """Shapes: inputs [T, d]; owner [T] int64."""
        keys = self.similarity.prepare(self.memory.keys)
        queries = self.similarity.prepare(inputs.to(keys.dtype))
        distance, rows = search_leaving_out(
            queries, keys, [(owner, self.owner)], self.k, inputs.device
        )
        if self.ratio is not None:
            distance = distance * self.ratio[rows].to(inputs.device)
        weigh, confidence_factor = (
            self.similarity.log(distance, torch.tensor(gamma, device=inputs.device))
            for gamma in (self.widths.gamma, self.widths.confidence_gamma)
        )
        return Recalled(
            rows,
            self.memory.values[rows].to(inputs.device),
            neighbour_weights(weigh),
            self.widths.confidence_factor * confidence(confidence_factor),
        )


class Sums:
    """What each case brought so far. Shape: total [M] fp64."""

    def __init__(self, cases: int) -> None:
        self.total = torch.zeros(cases, dtype=torch.float64)

    def add(self, rows: Tensor, brought: Tensor) -> None:
        """Shapes: rows, brought [T, K]."""
        self.total = self.total.index_add(0, rows.flatten().cpu(), brought.flatten().double().cpu())
