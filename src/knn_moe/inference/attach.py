"""Put a memory on a model and take it off again.

`attach` installs hooks and nothing else: no module is replaced, no weight or buffer is touched.
Knows the model's structure through routers/; what is computed is recall/'s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from knn_moe.config import RoutingConfig
from knn_moe.errors import AttachError, ConfigError, MemoryMismatchError
from knn_moe.explain.explanation import Explanation
from knn_moe.inference.arguments import (
    MemoryLike,
    check_config,
    check_memory,
    check_model,
    open_memory,
)
from knn_moe.inference.forward_pass import ForwardPass
from knn_moe.inference.handle import Handle, InUse, check_free, check_last, read_sequences
from knn_moe.inference.hidden_states import check_tokens
from knn_moe.inference.history import TokenHistory
from knn_moe.inference.hooks import HookStack, RecallHook, Selection
from knn_moe.inference.language_head import HeadHooks, make_head
from knn_moe.inference.stats import RoutingStats
from knn_moe.memory.distilled import DistilledLayer
from knn_moe.memory.memory import RoutingMemory
from knn_moe.recall.distilled import DistilledRecall
from knn_moe.recall.layer import LayerRecall, Recall, layer_gamma
from knn_moe.recall.neighbours import Widths
from knn_moe.routers.find import Router, find_routers
from knn_moe.routers.fingerprint import identify, matches_sketch
from knn_moe.routers.intercept import chooses_top_logits
from knn_moe.routers.model_state import unwrap


def attach(
    model: nn.Module,
    memory: MemoryLike,
    config: RoutingConfig | None = None,
    *,
    force: bool = False,
) -> Routing:
    """Let every router of `model` recall cases of `memory` until the handle is detached.

    Args:
        model: The model that the memory was built for.
        memory: The memory, or the folder or hub id of one.
        config: How the memory is used. None: as the memory itself says (`memory.routing`).
        force: Also attach a memory that was built for another model of the same shape.

    Returns:
        The handle: a context manager with `stats()`, `explain()` and `detach()`.

    Raises:
        AttachError: The model has a memory already, this one does not fit on its device, or what
            was given is no model or no memory.
        MemoryMismatchError: The memory belongs to another model.
        MemoryFormatError: There is no such memory, or it holds what no memory can hold.
        ConfigError: The config asks for what the memory does not have.
    """
    check_model(model)
    check_memory(memory)
    check_config(config)
    check_free(model)
    opened = open_memory(memory)
    config = config or opened.routing
    routing = Routing(model, opened, config, routers_for(model, opened, config, force=force))
    return routing.installed()


def routers_for(
    model: nn.Module, memory: RoutingMemory, config: RoutingConfig, *, force: bool
) -> list[Router]:
    """Return the routers that a memory is attached to when it is used as `config` says.

    Raises:
        MemoryMismatchError: The memory belongs to another model.
    """
    if not force:
        check_belongs(model, memory)
    return choose_routers(find_routers(model), memory, config)


def make_recall_hook(
    router: Router,
    memory: RoutingMemory,
    config: RoutingConfig,
    forward_pass: ForwardPass,
    selection: Selection | None = None,
) -> RecallHook:
    """Make the hook that recalls one layer's memory, on its router's device."""
    return RecallHook(
        router,
        open_recall(router, memory, config),
        forward_pass,
        count_changes=config.stats,
        selection=selection,
        spare_first_token=config.spare_first_token,
    )


def open_recall(router: Router, memory: RoutingMemory, config: RoutingConfig) -> Recall:
    """Put one layer's memory on its router's device.

    Raises:
        AttachError: It does not fit there.
        MemoryMismatchError: The router's precision cannot hold its values.
    """
    try:
        recall = _make_recall(router, memory, config)
        recall.check_values_fit(router.weight.dtype)
        return recall
    except torch.OutOfMemoryError:
        ways = 'Compress it (knn-moe compress), use RoutingConfig(index="fast"), or attach'
        if memory.distilled:
            ways = "Distil to fewer prototypes, or attach"
        raise AttachError(
            f"The memory ({memory.nbytes / 1e9:,.1f} GB) does not fit on {router.device} beside "
            f"the model. {ways} fewer layers with RoutingConfig(layers=…)."
        ) from None


def _make_recall(router: Router, memory: RoutingMemory, config: RoutingConfig) -> Recall:
    device, layer = router.device, memory.layers[router.layer]
    kernels_count = config.stats and device.type == "cuda"
    count_top = router.top_k if kernels_count and chooses_top_logits(router) else 0
    if isinstance(layer, DistilledLayer):
        factor = config.for_layer(router.layer).confidence_factor
        return DistilledRecall(layer, config, factor, device, count_top=count_top)
    gamma = layer_gamma(memory, router.layer, config, device)
    return LayerRecall(
        layer,
        Widths.of(gamma, router.layer, config),
        config,
        device,
        random_seed=memory.manifest.random_seed,
        count_top=count_top,
    )


class Routing(Handle):
    """The handle of an attached memory. `installed` attaches it; `detach` undoes that."""

    def __init__(
        self, model: nn.Module, memory: RoutingMemory, config: RoutingConfig, routers: list[Router]
    ) -> None:
        self.memory = memory
        self.config = config
        self._model = model
        self._pass = ForwardPass(model, routers or find_routers(model))
        self._history = TokenHistory(self._pass)
        self._hooks = [
            make_recall_hook(router, memory, config, self._pass)
            for router in routers
            if len(memory)
        ]
        heads = make_head(model, self._hooks, memory, config)
        self._heads = HeadHooks(model, heads, self._pass) if heads else None
        self._parts = [HookStack(hook.router, [hook], self._pass) for hook in self._hooks]
        self._parts += [self._heads] if self._heads is not None else []
        self._parts += [self._history, self._pass]

    def recall_hooks(self) -> list[RecallHook]:
        return self._hooks

    def stats(self) -> RoutingStats:
        """Return calls, tokens, mean λ and the share of tokens whose experts changed, by layer.

        A mapping from layers to their numbers, which a notebook and `print` show as a table.
        """
        return RoutingStats.of(self._hooks)

    def explain(
        self,
        input_ids: Tensor | str | None = None,
        attention_mask: Tensor | None = None,
        *,
        tokenizer: Any = None,
        last: int | None = None,
    ) -> Explanation:
        """Explain what the memory does to each token in each layer: the cases it recalls, with
        texts, distances and weights, λ, the experts that come in and go out, and the next tokens
        that the model expects with the memory and without.

        The text is read twice more, each row by itself, uncompiled: with the memory, and by the
        model alone. `stats()` does not count that.

        Args:
            input_ids: Token ids [T] or [B, T], or a text. None: what the model read last, prompt
                and generated tokens but the last one, which it never read.
            attention_mask: Which of the ids are no padding; the same shape.
            tokenizer: Turns tokens into text. None: they are shown as numbers.
            last: Explain only this many tokens, from the end.

        Returns:
            The explanation: printed as a table, written as a page by `save()`, or as JSON by
            `to_dict()`.

        Raises:
            NothingReadError: It is not known what the model read last.
        """
        if input_ids is None:
            sequences = self._history.sequences(_end_tokens(self._model))
        else:
            sequences = read_sequences(input_ids, attention_mask, tokenizer)
        check_last(last)
        used = InUse(self.memory, self.config, self._hooks, self)
        return self._explain(used, sequences, tokenizer, last)

    def __repr__(self) -> str:
        state = "attached" if self._attached else "detached"
        return f"Routing({state}, {len(self._hooks)} layers, {self.memory!r})"


def check_belongs(model: nn.Module, memory: RoutingMemory) -> None:
    """Raise MemoryMismatchError if `memory` was built for another model."""
    routers = find_routers(model)
    identity = identify(model, routers)
    same = identity.fingerprint == memory.base_model.fingerprint
    if not same and not matches_sketch(memory.manifest.router_sketch, routers):
        raise MemoryMismatchError(
            f"This memory was built for {memory.base_model}, and the model is {identity}. "
            f"Build one for this model. If you know that they belong together, attach it with "
            f"force=True; knn-moe generate, chat, serve, explain, calibrate, distil and prune have "
            f"--force."
        )
    check_tokens(model, memory)


def choose_routers(
    routers: list[Router], memory: RoutingMemory, config: RoutingConfig
) -> list[Router]:
    """Return the routers of the chosen layers whose routing the memory changes.

    A head of router inputs needs one of them anyway.
    """
    by_layer = {router.layer: router for router in routers}
    wanted = tuple(memory.layers) if config.layers is None else config.layers
    missing = [index for index in wanted if index not in memory.layers]
    if missing:
        raise ConfigError(f"The memory has no layer {missing[0]}. It has: {sorted(memory.layers)}.")
    for index in wanted:
        shape = memory.layers[index].shape
        router = by_layer.get(index)
        if router is None or (router.hidden_size, router.num_experts) != shape[:2]:
            raise MemoryMismatchError(
                f"The memory's layer {index} maps {shape.hidden_size} → {shape.num_experts} for "
                f"{memory.base_model}; the model's is "
                f"{f'{router.hidden_size} → {router.num_experts}' if router else 'not there'}."
            )
    used = [index for index in wanted if config.for_layer(index).confidence_factor > 0]
    if not used and config.head is not None and config.head.keys == "router":
        used = [max(wanted)]
    return [by_layer[index] for index in used]


def _end_tokens(model: nn.Module) -> tuple[int, ...]:
    """Return the tokens that end a sequence in `generate`."""
    generation = getattr(unwrap(model), "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    return tuple(ends) if isinstance(ends, list | tuple) else () if ends is None else (ends,)
