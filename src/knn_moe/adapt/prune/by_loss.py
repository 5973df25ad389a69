"""Score each case by how much lower the loss of other examples is because of it.

The reference set is read with the memory on, each token's own example left out. Where case i is
recalled with weight w_i at confidence λ, the mixed logits contain λ w_i (v_i - r) of it, r being
the router's own logits. Times the gradient of the loss in the mixed logits, that is to first order
what the loss would lose if r stood in the case's place. One backward pass serves all layers and
cases; the other layers' logits are held as they are, as when the memory was built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from knn_moe.build.optimise import summed_loss
from knn_moe.errors import RouterNotCalledError
from knn_moe.recall.leave_one_out import LeaveOneOutRecall
from knn_moe.recall.neighbours import Neighbours, Recalled
from knn_moe.reference.windows import Batch
from knn_moe.routers.grouped_experts import use_grouped_experts
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import freeze, input_device, install_hooks


class ScoredRecall(LeaveOneOutRecall):
    """Recalls as it would be attached, with the mixed logits as a leaf that takes a gradient."""

    leaf: Tensor | None = None
    _call: tuple[Neighbours, Recalled, Tensor]

    def __call__(self, inputs: Tensor, logits: Tensor) -> Tensor:
        with torch.no_grad():
            near = self.nearest(inputs)
            recalled = self.weigh(near)
            own = logits.detach().float()
            mixed = recalled.mix(own)
        self._call = near, recalled, own
        self.leaf = mixed.requires_grad_()
        return self.leaf.to(logits.dtype)

    def called_leaf(self) -> Tensor:
        """Return the mixed logits of the last call."""
        if self.leaf is None:
            raise RouterNotCalledError(
                f"Router {self.cases.router.name!r} was never called, so its cases cannot be "
                f"scored. A fused block may bypass it: load the model without it."
            )
        return self.leaf

    def add_gains(self, gradient: Tensor, scores: Tensor) -> None:
        """Add what each recalled case takes off the loss. Shapes: [T, N]; scores [M] fp64."""
        near, recalled, own = self._call
        moved = recalled.values - own[:, None]
        gains = -(moved * gradient[:, None]).sum(dim=-1) * recalled.weights
        gains = gains * recalled.confidence[:, None]
        scores.index_add_(0, near.rows.flatten().cpu(), gains.flatten().double().cpu())


def score_by_loss(
    model: nn.Module,
    recalls: Sequence[ScoredRecall],
    batches: Sequence[Batch],
    on_step: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return each case's gain in nats, summed over tokens and layers. Shape [M] fp64.

    Raises:
        RouterNotCalledError: The model bypasses a router.
    """
    device = input_device(model)
    hooks = [RouterHook(recall.cases.router, recall) for recall in recalls]
    with (
        freeze(model),
        use_grouped_experts(model),
        torch.inference_mode(False),
        torch.enable_grad(),
        install_hooks(hooks),
    ):
        scores = torch.zeros(len(recalls[0].cases.owner), dtype=torch.float64)
        for batch in batches:
            for recall in recalls:
                recall.begin(batch)
            loss = summed_loss(model, batch.to(device))
            leaves = [recall.called_leaf() for recall in recalls]
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
            for recall, gradient in zip(recalls, gradients, strict=True):
                if gradient is not None:
                    recall.add_gains(gradient, scores)
            on_step()
    return scores
