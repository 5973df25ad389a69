"""Recall among the cases of other examples: what calibration and pruning measure a memory by.

A token recalls every example but its own, as the tokens of a new text would. Searches are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from knn_moe.config import RoutingConfig
from knn_moe.equations.similarity import SIMILARITIES, Similarity
from knn_moe.index.leave_one_out import search_leaving_out
from knn_moe.recall.neighbours import Neighbours, Recalled, Widths, weigh
from knn_moe.reference.windows import Batch
from knn_moe.routers.find import Router


@dataclass(frozen=True)
class Cases:
    """One layer's cases and the router that recalls them.

    Keys and values may be mapped files: a search reads a block of keys at a time, and the values of
    the cases it finds. Shapes: keys [M, d]; values [M, N]; owner [M] int64, a hash of each case's
    example.
    """

    router: Router
    keys: Tensor
    values: Tensor
    owner: Tensor
    gamma: float
    similarity: Similarity = SIMILARITIES["rbf"]

    def nearest(self, inputs: Tensor, owner: Tensor, k: int) -> Neighbours:
        """Find the k nearest cases of other examples.

        Shapes: inputs [T, d]; owner [T] int64, of the tokens. Distances are where the inputs are,
        rows where the keys are.
        """
        # A similarity other than RBF makes a copy of the keys, which is held for this search only.
        keys = self.similarity.prepare(self.keys)
        queries = self.similarity.prepare(inputs.to(self.keys.dtype))
        labels = [(owner.to(inputs.device), self.owner)]
        return Neighbours(*search_leaving_out(queries, keys, labels, k, inputs.device))

    def weigh(self, near: Neighbours, widths: Widths) -> Recalled:
        """Weigh neighbours and take λ from them."""
        distance = near.squared_distance
        values = self.values[near.rows].to(distance.device)
        return weigh(distance, values, widths, self.similarity)


class LeaveOneOutRecall:
    """A router callback that mixes in what the cases of other examples propose.

    `begin` is to be called before each batch.

    Args:
        cases: The cases of one layer.
        config: How they are used.
    """

    def __init__(self, cases: Cases, config: RoutingConfig) -> None:
        self.cases = cases
        self.widths = Widths.of(cases.gamma, cases.router.layer, config)
        self.k = config.k
        self.spares_first = config.spare_first_token
        self.owner = torch.empty(0, dtype=torch.int64)  # of each token, 0 for padding
        self.spared: Tensor | None = None

    def begin(self, batch: Batch) -> None:
        """Say which batch is read next."""
        self.owner = batch.token_owner
        self.spared = batch.first_tokens if self.spares_first else None

    def __call__(self, inputs: Tensor, logits: Tensor) -> Tensor:
        return self.recall(inputs).mix(logits)

    def recall(self, inputs: Tensor) -> Recalled:
        """Recall the cases of other examples. Shapes: inputs [T, d]."""
        return self.weigh(self.nearest(inputs))

    def nearest(self, inputs: Tensor) -> Neighbours:
        """Find the neighbours that are weighed. Shapes: inputs [T, d]."""
        return self.cases.nearest(inputs, self.owner, self.k)

    def weigh(self, near: Neighbours) -> Recalled:
        """Weigh neighbours; spared tokens have a λ of 0."""
        return self.cases.weigh(near, self.widths).spare(self.spared)
