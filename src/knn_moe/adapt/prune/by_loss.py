"""What each case is worth to the model: how much lower the loss of other examples is for it.

The reference set is read with the memory attached, each token's own example left out. Where case i
is recalled with weight w_i at confidence λ, the mixed logits hold λ w_i (v_i - r) of it, r being
the router's own. Times the slope of the loss in the mixed logits, that is to first order what the
loss would lose with r in the case's place. One backward pass serves all layers and cases; the other
layers' logits are held as they are, as when the memory was built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from knn_moe.adapt.calibrate.splits import Reading
from knn_moe.adapt.prune.recalled import Layer, Recalled, Sums
from knn_moe.build.optimise import summed_loss
from knn_moe.equations.mixing import mix_logits
from knn_moe.errors import RouterNotCalledError
from knn_moe.routers.find import Router
from knn_moe.routers.grouped_experts import use_grouped_experts
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import freeze, input_device, install_hooks


class _Mix:
    """One layer, mixing as it would be attached; remembers what it mixed, for the slope."""

    def __init__(self, router: Router, layer: Layer) -> None:
        self.router = router
        self.layer = layer
        self.owner = torch.empty(0)
        self.leaf: Tensor | None = None
        self._found: tuple[Recalled, Tensor] | None = None

    def __call__(self, inputs: Tensor, logits: Tensor) -> Tensor:
        with torch.no_grad():
            found = self.layer.recall(inputs, self.owner)
            own = logits.detach().float()
            mixed = mix_logits(own, found.proposal, found.confidence_factor)
        self._found = found, own
        self.leaf = mixed.requires_grad_()
        return self.leaf.to(logits.dtype)

    def called(self) -> Tensor:
        """The mixed logits, as a leaf."""
        if self.leaf is None:
            raise RouterNotCalledError(
                f"Router {self.router.name!r} was never called, so its cases cannot be judged. A "
                f"fused block may go around it: load the model without it."
            )
        return self.leaf

    def count(self, slope: Tensor | None, sums: Sums) -> None:
        if slope is None or self._found is None:
            return
        found, own = self._found
        sums.add(found.rows, found.brought(slope, own) * found.confidence_factor[:, None])


def worth_by_loss(
    model: nn.Module,
    routers: Sequence[Router],
    layers: Mapping[int, Layer],
    readings: Sequence[Reading],
    on_step: Callable[[], None] = lambda: None,
) -> Tensor:
    """In nats, summed over tokens and layers. Shape [M] fp64."""
    mixes = [_Mix(router, layers[router.layer]) for router in routers]
    sums = Sums(len(next(iter(layers.values())).owner))
    device = input_device(model)
    hooks = [RouterHook(mix.router, mix) for mix in mixes]
    with (
        freeze(model),
        use_grouped_experts(model),
        torch.inference_mode(False),
        torch.enable_grad(),
        install_hooks(hooks),
    ):
        for reading in readings:
            for mix in mixes:
                mix.owner = reading.owner
            loss = summed_loss(model, reading.batch.to(device))
            leaves = [mix.called() for mix in mixes]
            slopes = torch.autograd.grad(loss, leaves, allow_unused=True)
            for mix, slope in zip(mixes, slopes, strict=True):
                mix.count(slope, sums)
            on_step()
    return sums.total
