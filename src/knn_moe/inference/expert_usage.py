"""Which experts a model chooses, how evenly, and how much of a recall is due to the nearest case.

Watches the routers' own outputs, with a memory attached or without: what is counted is what was
used. Knows the attached memory through its handle's observer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from knn_moe.errors import AttachError, ConfigError, UnsupportedModelError
from knn_moe.inference.attach import Routing
from knn_moe.inference.forward_pass import ForwardPass
from knn_moe.recall.layer import RouterCall
from knn_moe.routers.find import Router, find_routers
from knn_moe.routers.intercept import chosen_experts, run_router
from knn_moe.routers.model_state import input_device, install_hooks


class ExpertCounts:
    """How often each expert was chosen, by layer, and for how many tokens."""

    def __init__(self, routers: list[Router]) -> None:
        self.routers = routers
        self.counts = {
            router.layer: torch.zeros(router.num_experts, dtype=torch.int64) for router in routers
        }
        self.tokens = dict.fromkeys(self.counts, 0)

    def install(self) -> list[RemovableHandle]:
        """Put a hook on every router."""
        return [
            router.module.register_forward_hook(partial(self.add, router))
            for router in self.routers
        ]

    def add(self, router: Router, module: nn.Module, args: Any, output: Any) -> None:
        """Count a call: a forward hook of the router."""
        chosen = chosen_experts(router, output, _logits(router, output)).cpu()
        self.counts[router.layer] += torch.bincount(chosen.flatten(), minlength=router.num_experts)
        self.tokens[router.layer] += len(chosen)

    def shares(self) -> Tensor:
        """Return the share of tokens each expert was chosen for. Shape [layers, experts]."""
        return torch.stack(
            [count / max(self.tokens[layer], 1) for layer, count in self.counts.items()]
        )


class RouterLoad:
    """How evenly tokens are spread over the experts of all layers; padding does not count.

    Shapes: choices [N] int64, how often each expert was chosen; probability [N] fp64, the sum of
    the routers' softmax over tokens. A token counts once in every layer.
    """

    def __init__(self, routers: list[Router], forward_pass: ForwardPass) -> None:
        widths = sorted({router.num_experts for router in routers})
        if len(widths) > 1:
            raise UnsupportedModelError(
                f"The load over all layers needs equally many experts in each, got {widths}."
            )
        self.routers = routers
        self.forward_pass = forward_pass
        self.choices = torch.zeros(widths[0], dtype=torch.int64)
        self.probability = torch.zeros(widths[0], dtype=torch.float64)
        self.tokens = 0

    def install(self) -> list[RemovableHandle]:
        """Put a hook on every router, and those that know the padding on the model."""
        hooks = [
            router.module.register_forward_hook(partial(self.add, router))
            for router in self.routers
        ]
        return [*self.forward_pass.install(), *hooks]

    @torch.no_grad()
    def add(self, router: Router, module: nn.Module, args: Any, output: Any) -> None:
        """Count a call: a forward hook of the router."""
        logits = _logits(router, output)
        chosen = chosen_experts(router, output, logits)
        probability = torch.softmax(logits, dim=-1, dtype=torch.float32)
        real = self.forward_pass.real(len(logits), logits.device)
        if real is not None:
            chosen, probability = chosen[real], probability[real]
        self.choices += torch.bincount(chosen.flatten(), minlength=router.num_experts).cpu()
        self.probability += probability.sum(dim=0, dtype=torch.float64).cpu()
        self.tokens += len(chosen)

    def loss(self) -> float:
        """Return the load-balancing loss N Σ_e f_e P_e of all tokens (appendix, "Load Balancing").

        f_e is the share of tokens that chose expert e, P_e the mean probability of it: top_k if
        every expert is as likely as the others, more if the likely ones are chosen more often.
        """
        if self.tokens == 0:
            raise ConfigError("No router has been called yet. Run the model inside router_load.")
        chosen, likely = self.choices.double() / self.tokens, self.probability / self.tokens
        return float(len(self.choices) * (chosen @ likely))


@dataclass(frozen=True)
class SimilarityShare:
    """The mean share of the nearest case in the K cases' similarity, by layer and over all."""

    layers: dict[int, float]
    overall: float
    tokens: int  # the weight of this text beside others


@contextmanager
def count_experts(model: nn.Module) -> Iterator[ExpertCounts]:
    """Count which experts the routers of `model` choose inside."""
    routers = find_routers(model)
    counts = ExpertCounts(routers)
    with install_hooks([counts]):
        yield counts


@contextmanager
def router_load(model: nn.Module) -> Iterator[RouterLoad]:
    """Measure how evenly the routers of `model` spread their tokens inside.

    Padding is known from the attention mask that the model is called with.
    """
    routers = find_routers(model)
    for router in routers:
        _check_returns_logits(router)
    load = RouterLoad(routers, ForwardPass(model, routers))
    with install_hooks([load]):
        yield load


@torch.no_grad()
def similarity_share(model: nn.Module, routing: Routing, ids: Tensor) -> SimilarityShare:
    """Run `model` once and return the nearest case's share of the similarity, s_1 / Σ_j s_j.

    Over the K cases that `routing` recalls for each token; the paper's Top-1 Share is that of
    K = 5 (appendix, "Further Analysis on the Number of Neighbors"). The run counts in
    `routing.stats()` like any other. Shapes: ids [B, T], every token real.
    """
    if ids.ndim != 2 or ids.numel() == 0:
        raise ConfigError(f"similarity_share takes token ids [B, T], got {list(ids.shape)}.")
    layers: dict[int, float] = {}

    def keep(call: RouterCall) -> None:
        _, weight = call.recall.recall_weighed(call.inputs)
        layers[call.layer] = float(weight[:, 0].mean(dtype=torch.float64))

    with routing.observed(keep), torch.compiler.set_stance("force_eager"):
        model(ids.to(input_device(model)), use_cache=False)
    if not layers or set(routing.stats()) - set(layers):
        raise AttachError(
            "The model does not call the attached memory, or the memory is empty. Give "
            "similarity_share the model that the memory is attached to."
        )
    return SimilarityShare(layers, sum(layers.values()) / len(layers), ids.numel())


def _logits(router: Router, output: Any) -> Tensor:
    """Return a router's output for each expert: its logits, or scores in the same order.

    Result [T, N].
    """
    for part in output if isinstance(output, tuple) else (output,):
        if isinstance(part, Tensor) and part.ndim > 1 and part.shape[-1] == router.num_experts:
            return part.flatten(0, -2)
    raise UnsupportedModelError(
        f"Router {router.name!r} returned no tensor with a column for each of its "
        f"{router.num_experts} experts."
    )


@torch.no_grad()
def _check_returns_logits(router: Router) -> None:
    """Raise UnsupportedModelError if the router returns probabilities or scores instead of logits:
    another softmax of those would look like a load, too."""
    inputs = torch.zeros(1, router.hidden_size, device=router.device, dtype=router.weight.dtype)
    # Whole numbers, exact in bf16 up to 256 experts, and no distribution.
    trial = torch.arange(router.num_experts, device=router.device)[None]
    output = run_router(router, lambda _, own: trial.to(own.dtype), (inputs,), {})
    if not torch.equal(_logits(router, output).float(), trial.float()):
        raise UnsupportedModelError(
            f"Router {router.name!r} does not return its logits, so its load cannot be measured. "
            f"Use count_experts, which counts its choices."
        )
