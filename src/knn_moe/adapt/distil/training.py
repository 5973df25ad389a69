"""Train the prototypes of all layers together, through the frozen model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import nn

from knn_moe.adapt.calibrate.fit import batch_order
from knn_moe.adapt.calibrate.objective import line_losses
from knn_moe.adapt.distil.prototypes import Prototypes, Start
from knn_moe.memory.distilled import DistilledLayer
from knn_moe.reference.windows import Batch
from knn_moe.routers.dense_gradients import DenseGradientHook
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import freeze, input_device, install_hooks

_BETAS: Final = (0.9, 0.99)  # of Adam
_SMALLEST: Final = 1e-12  # an update's gradient may be as small as 1e-8


class Training:
    """Prototypes in training: passes over batches, at steps that fall to 0 over all of them.

    Args:
        model: The model, which is not changed.
        starts: Where each layer's prototypes start.
        dtype: The precision in which they are kept.
        batches: What a pass reads, in another order each time.
        passes: After which the steps are 0.
        rate: The size of the first steps, see Prototypes.steps.
        gradient: "dense": through all experts; "sparse": through the chosen ones.
    """

    def __init__(
        self,
        model: nn.Module,
        starts: Sequence[Start],
        dtype: torch.dtype,
        batches: Sequence[Batch],
        passes: int,
        rate: float,
        gradient: str,
    ) -> None:
        self.model, self.batches, self.gradient = model, batches, gradient
        self.prototypes = [Prototypes(start, dtype) for start in starts]
        groups = [group for each in self.prototypes for group in each.steps(rate)]
        fused = starts[0].keys.is_cuda or None  # on a GPU one launch per tensor, not a dozen
        self.adam = torch.optim.Adam(groups, betas=_BETAS, eps=_SMALLEST, fused=fused)
        self.order = batch_order(len(batches), passes * len(batches))
        self.done = 0

    def run_pass(self, on_step: Callable[[], None]) -> None:
        """Read all batches once. Call `on_step` after each."""
        first = self.done
        hooks = [
            RouterHook(each.router, each)
            if self.gradient == "sparse"
            else DenseGradientHook(self.model, each.router, each)
            for each in self.prototypes
        ]
        with freeze(self.model), torch.enable_grad(), install_hooks(hooks):
            for place in self.order[first : first + len(self.batches)]:
                self._step(self.batches[place])
                on_step()

    def _step(self, batch: Batch) -> None:
        spared = batch.first_tokens.to(input_device(self.model))
        for each in self.prototypes:
            each.spared = spared.to(each.keys.device)
        for group in self.adam.param_groups:
            group["lr"] = group["most"] * (1 - self.done / len(self.order))
        self.adam.zero_grad()
        loss = line_losses(self.model, batch).sum() / int(batch.counts.sum())
        loss.backward()
        self.adam.step()
        self.done += 1

    def read(self) -> Mapping[int, DistilledLayer] | None:
        """Return the layers as they are now; None: a number is not finite."""
        parameters = [parameter for each in self.prototypes for parameter in each.parameters()]
        if not all(bool(parameter.isfinite().all()) for parameter in parameters):
            return None
        return {each.router.layer: each.read() for each in self.prototypes}
