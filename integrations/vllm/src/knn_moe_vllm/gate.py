"""vLLM's router linears with a memory behind them, and the op that keeps compilers out of it.

Knows vLLM's layers. What is mixed into the logits is placed.py's and store.py's.
"""

from __future__ import annotations

from typing import Any

import torch
from knn_moe.errors import UnsupportedModelError
from torch import Tensor, nn
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from knn_moe_vllm.store import STORE

_LIBRARY = torch.library.Library("knn_moe", "FRAGMENT")


class RouterWeights(nn.Module):
    """What the checkpoint gave a router, under the names that transformers uses.

    vLLM's CPU backend packs a router's weight away after loading, and the model is recognised by
    it.
    """

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        for name, parameter in gate.named_parameters(recurse=False):
            if name in ("weight", "bias"):
                copy = nn.Parameter(parameter.detach().clone(), requires_grad=False)
                self.register_parameter(name, copy)


class _Remembering(UnquantizedLinearMethod):
    """A gate's own method that keeps the weights before it processes them."""

    def __init__(self, own: UnquantizedLinearMethod) -> None:
        super().__init__()
        self.own = own

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        object.__setattr__(layer, "loaded", RouterWeights(layer))  # it is no part of the model
        self.own.process_weights_after_loading(layer)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        return self.own.apply(*args, **kwargs)


class MemoryGate(GateLinear):
    """A router whose logits go through the memories of this process."""

    router_name = ""
    layer = 0
    loaded: RouterWeights | None = None
    quant_method: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        name = kwargs.get("prefix", "")
        if not STORE.loading or "shared" in name.rpartition(".")[2]:
            return
        if not isinstance(self.quant_method, UnquantizedLinearMethod):
            raise UnsupportedModelError(
                f"Router {name!r} is quantised ({type(self.quant_method).__name__}), and memories "
                f"are recognised by its weights. Serve a checkpoint whose routers are not."
            )
        self.quant_method = _Remembering(self.quant_method)
        self.router_name = name
        self.layer = STORE.add_gate(self)

    def forward(self, x: Tensor) -> Any:
        output = super().forward(x)
        if self.router_name:
            logits = output[0] if isinstance(output, tuple) else output
            torch.ops.knn_moe.mix_(x, logits, self.layer)
        return output


def _mix_(x: Tensor, logits: Tensor, layer: int) -> None:
    """Let tokens recall their memories. Shapes: x [T, d]; logits [T, N], which are changed."""
    STORE.mix_(x, logits, layer)


def _mix_of_no_data(x: Tensor, logits: Tensor, layer: int) -> None:
    """Tell a compiler that nothing is returned."""


def install() -> None:
    """Define the op, and have vLLM make routers of ours."""
    if GateLinear.__name__ in op_registry_oot:
        return
    _LIBRARY.define("mix_(Tensor x, Tensor(a!) logits, int layer) -> ()")
    _LIBRARY.impl("mix_", _mix_, "CompositeExplicitAutograd")
    torch.library.register_fake("knn_moe::mix_", _mix_of_no_data, lib=_LIBRARY)
    GateLinear.register_oot(MemoryGate)
