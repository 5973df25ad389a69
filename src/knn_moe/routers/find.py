"""Find a model's MoE routers. Knows how transformers declares and names them.

Does not know how logits are recorded or replaced (intercept.py), nor how any family gates: the
router's own forward does that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import Any, Final

import torch
from torch import Tensor, nn

from knn_moe.errors import UnsupportedModelError
from knn_moe.routers.model_state import run_device
from knn_moe.support.given import say_no_model

ENTRY_POINTS: Final = "knn_moe.routers"
_ROUTER_NAMES: Final = ("gate", "router")
_TOP_K_NAMES: Final = ("top_k", "num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")
_ATTENTION: Final = re.compile(r"(^|[._])(self_attn|self_attention|attention|attn)($|[._])")


@dataclass(frozen=True)
class Router:
    """One MoE layer's router: where it is and what it maps, x [d] → logits [N] → top-k.

    Attributes:
        name: The module's name in the model.
        layer: The number of its decoder layer.
        num_experts: N.
        hidden_size: d.
        top_k: How many experts it chooses for a token.
        module: The router.
        scope: The module whose forward computes the logits: the router, or the block around it.
    """

    name: str
    layer: int
    num_experts: int
    hidden_size: int
    top_k: int
    module: nn.Module = field(repr=False)
    scope: nn.Module = field(repr=False)

    @property
    def weight(self) -> Tensor:
        """The matrix that computes the logits. Shape [N, d]."""
        return next(_weights(self.module))

    @property
    def device(self) -> torch.device:
        """The device that the router runs on."""
        return run_device(self.module)


def find_routers(model: nn.Module) -> list[Router]:
    """Return every MoE router of `model`, in the order of its layers.

    Looks, in this order, for: adapters registered under the entry-point group 'knn_moe.routers' (a
    callable from the model to {module name: router module} or None); what transformers declares
    for `output_router_logits`; modules named 'gate' or 'router' inside an MoE block.

    Args:
        model: A transformers model, also with PEFT adapters outside its routers.

    Raises:
        UnsupportedModelError: There is no router, it has an adapter on its linear map, nothing says
            how many experts it chooses, or what was given is no model.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(say_no_model(model))
    found = _find_registered(model) or _find_declared(model) or _find_named(model)
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no router this library can find. Looked for: a "
            f"'router_logits' entry in the model's _can_record_outputs, and modules named "
            f"{' or '.join(_ROUTER_NAMES)} in a mixture-of-experts block. A model whose routers "
            f"look different needs an adapter under the entry-point group '{ENTRY_POINTS}'."
        )
    return _number([_describe(model, name, module) for name, module in found.items()])


def _find_registered(model: nn.Module) -> dict[str, nn.Module]:
    for entry in entry_points(group=ENTRY_POINTS):
        found = entry.load()(model)
        if found:
            return dict(found)
    return {}


def _find_declared(model: nn.Module) -> dict[str, nn.Module]:
    """Find routers by class, from each sub-model's `_can_record_outputs["router_logits"]`.

    Older releases declare the whole block instead of the router in it.
    """
    found: dict[str, nn.Module] = {}
    for prefix, part in model.named_modules():
        declared = (getattr(type(part), "_can_record_outputs", None) or {}).get("router_logits", ())
        recorders = declared if isinstance(declared, list | tuple) else (declared,)
        for inner, module in part.named_modules(prefix=prefix):
            if any(_records(recorder, inner, module) for recorder in recorders):
                name, router = _find_in_block(inner, module)
                found[name] = router
    return found


def _records(recorder: Any, name: str, module: nn.Module) -> bool:
    """Whether transformers would record this module's router logits (except in attention)."""
    target = getattr(recorder, "target_class", recorder)
    suffix = getattr(recorder, "layer_name", None) or ""
    path = f".{name}.".replace(".base_layer.", ".")
    return (
        isinstance(target, type)
        and isinstance(module, target)
        and f".{suffix}.".replace("..", ".") in path
        and not _ATTENTION.search(name)
    )


def _find_in_block(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """Return the router of a block, or `module` itself if it is not a block."""
    for child in _ROUTER_NAMES:
        if hasattr(module, "experts") and hasattr(module, child):
            return _unwrap_adapter(f"{name}.{child}", getattr(module, child))
    return name, module


def _unwrap_adapter(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """Return the router inside the adapters that PEFT has put around it."""
    while isinstance(getattr(module, "base_layer", None), nn.Module):
        name, module = f"{name}.base_layer", module.base_layer  # type: ignore[assignment]
    return name, module


def _find_named(model: nn.Module) -> dict[str, nn.Module]:
    """Find the outermost modules named gate or router in MoE blocks that have an [N, d] weight."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        parent, _, last = name.rpartition(".")
        inside = any(name.startswith(f"{name_without_adapters(outer)}.") for outer in found)
        if last not in _ROUTER_NAMES or inside or _ATTENTION.search(parent):
            continue
        block = model.get_submodule(parent)
        is_moe = "moe" in type(block).__name__.lower() or hasattr(block, "experts")
        router_name, router = _unwrap_adapter(name, module)
        if is_moe and any(True for _ in _weights(router)):
            found[router_name] = router
    return found


def _describe(model: nn.Module, name: str, module: nn.Module) -> Router:
    parent = block_of(model, name)
    _refuse_adapted(model, name, module)
    num_experts, hidden_size = next(_weights(module)).shape
    numbers = re.findall(r"(?:^|\.)(\d+)(?:\.|$)", name)
    # GPT-OSS in MXFP4 computes the logits in the block's forward and never calls the router.
    computed_by_block = type(getattr(parent, "experts", None)).__name__.startswith("Mxfp4")
    return Router(
        name=name,
        layer=int(numbers[0]) if numbers else 0,
        num_experts=num_experts,
        hidden_size=hidden_size,
        top_k=_top_k(name, (module, parent, *_configs(model))),
        module=module,
        scope=parent if computed_by_block else module,
    )


def name_without_adapters(name: str) -> str:
    """Return a router's name without the PEFT wrappers around it."""
    return name.replace(".base_layer", "")


def block_of(model: nn.Module, name: str) -> nn.Module:
    """Return the MoE block of the router called `name`."""
    return model.get_submodule(name_without_adapters(name).rpartition(".")[0])


def _refuse_adapted(model: nn.Module, name: str, module: nn.Module) -> None:
    """Refuse an adapter on the linear map: it would add to the logits that a memory has mixed.

    PEFT's ParamWrapper changes the weight itself, before the logits are computed.
    """
    outer = name_without_adapters(name)
    around = type(model.get_submodule(outer)).__name__ if outer != name else "ParamWrapper"
    inside = any(hasattr(child, "base_layer") for child in module.children())
    if inside or around != "ParamWrapper":
        raise UnsupportedModelError(
            f"Router {outer!r} has an adapter on its linear map, which would act after the memory. "
            f"Merge it first (merge_and_unload), or leave the router out of target_modules."
        )


def _top_k(name: str, places: tuple[object, ...]) -> int:
    for place in places:
        for attribute in _TOP_K_NAMES:
            value = getattr(place, attribute, None)
            if isinstance(value, int):
                return value
    raise UnsupportedModelError(
        f"Nothing says how many experts router {name!r} chooses. "
        f"Looked for: {', '.join(_TOP_K_NAMES)} on the router, its block and the model's config."
    )


def _configs(model: nn.Module) -> Iterator[object]:
    config: Any = getattr(model, "config", None)
    if config is not None:
        yield config
        yield config.get_text_config() if hasattr(config, "get_text_config") else config


def _weights(module: nn.Module) -> Iterator[Tensor]:
    """Yield the [N, d] matrices that may compute the logits: the router's own comes first."""
    own = getattr(module, "weight", None)
    if isinstance(own, Tensor) and own.ndim == 2:
        yield own
    for child in module.children():
        linear = getattr(child, "base_layer", child)
        if isinstance(linear, nn.Linear):
            yield linear.weight


def _number(routers: list[Router]) -> list[Router]:
    """Order by layer; number in order of appearance where two share one (encoder, decoder)."""
    if len({router.layer for router in routers}) < len(routers):
        return [replace(router, layer=index) for index, router in enumerate(routers)]
    return sorted(routers, key=lambda router: router.layer)
