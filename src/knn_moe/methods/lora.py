"""LoRA adapters. The only file that imports peft, and only where it is used.

Every linear map except the output embedding gets an adapter: `nn.Linear` modules, and parameters
that transformers 5 keeps as plain tensors: a router's matrix [N, d] and the experts' [N, in, out]
or [N, out, in]. They are found by shape and place, in any model family.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from knn_moe.errors import MissingDependencyError, UnsupportedModelError
from knn_moe.methods.training_loop import (
    Trainable,
    TuneConfig,
    WeightChanges,
    restore_hooks_and_order,
)
from knn_moe.routers.find import block_of, find_routers
from knn_moe.routers.model_state import freeze


@dataclass(frozen=True)
class LowRankChange:
    """ΔW = scale · left right. Shapes: left [..., a, r]; right [..., r, b]."""

    left: Tensor
    right: Tensor
    scale: float

    def apply_to(self, weight: Tensor) -> Tensor:
        left, right = (part.to(weight.device, torch.float32) for part in (self.left, self.right))
        return (weight.float() + self.scale * (left @ right)).to(weight.dtype)


@dataclass(frozen=True)
class LinearMaps:
    """Names of linear modules, and of parameters that are linear maps by themselves."""

    modules: list[str]
    parameters: list[str]


def find_linear_maps(model: nn.Module) -> LinearMaps:
    """Find every linear map of a model except its output embedding.

    Raises:
        UnsupportedModelError: The experts are not plain matrices, for example because they are
            quantised.
    """
    holder: Any = model
    output = holder.get_output_embeddings()
    modules = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output
    ]
    inside = {id(model.get_submodule(name).weight) for name in modules}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = []
    for router in find_routers(model):
        block = block_of(model, router.name)
        experts = [weight for weight in block.parameters() if weight.ndim == 3]
        own = {id(weight) for weight in router.module.parameters()}
        others = {id(weight) for weight in block.parameters()} - own
        if not experts and not others & inside:
            raise UnsupportedModelError(
                f"The experts of router {router.name!r} are not matrices that can be tuned. "
                f"Load the model unquantised (for GPT-OSS: Mxfp4Config(dequantize=True))."
            )
        found += [weight for weight in (router.weight, *experts) if id(weight) not in inside]
    return LinearMaps(modules, [names[id(weight)] for weight in found])


@contextmanager
def add_adapters(model: nn.Module, config: TuneConfig) -> Iterator[Trainable]:
    """Put trainable LoRA adapters on all linear maps; remove them on exit.

    They are fp32 whatever the model's dtype, and drawn from torch's global generator.

    Raises:
        MissingDependencyError: PEFT is not installed.
        UnsupportedModelError: The model has linear maps that cannot have an adapter.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise MissingDependencyError(
            "LoRA adapters need PEFT: pip install 'knn-moe[tune]'."
        ) from None
    holder: Any = model
    targets = find_linear_maps(model)
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=targets.modules,
        target_parameters=targets.parameters,
    )
    with freeze(model), restore_hooks_and_order(model):
        adapted: Any = get_peft_model(holder, lora)
        try:
            layers = dict(_adapter_layers(adapted.get_base_model()))
            missing = {f"{name}.weight" for name in targets.modules} | set(targets.parameters)
            missing -= set(layers)
            if missing:
                raise UnsupportedModelError(f"PEFT put no adapter on {sorted(missing)[0]!r}.")

            def copy_changes() -> WeightChanges:
                return {name: _copy_factors(layer) for name, layer in layers.items()}

            yield Trainable(adapted, copy_changes)
        finally:
            adapted.unload()


def _adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield PEFT's layers with the name of the parameter they adapt."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            bare = name.replace(".base_layer", "")
            yield f"{bare}.{getattr(module, 'parameter_name', 'weight')}", module


@torch.no_grad()
def _copy_factors(layer: Any) -> LowRankChange:
    """Copy a layer's factors, in the shape of the parameter they change.

    PEFT keeps the factors of N experts side by side: A as [N·r, in], B as [out, r·N].
    """
    (name,) = layer.active_adapters
    right = layer.lora_A[name].weight.detach().clone()
    left = layer.lora_B[name].weight.detach().clone()
    count = getattr(layer, "num_experts", 1)
    if count > 1:
        right = right.view(count, -1, right.shape[1])
        left = left.view(left.shape[0], -1, count).permute(2, 0, 1)
        if getattr(layer.get_base_layer(), "is_transposed", False):  # W is [N, in, out]
            left, right = right.mT, left.mT
    return LowRankChange(left.contiguous(), right.contiguous(), layer.scaling[name])
