"""Put a memory on a model and take it off again.

`attach` installs hooks and nothing else: no module is replaced, no weight or buffer is touched.
Knows the model's structure through routers.py and intercept.py; the mathematics is recall.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from knn_moe.config import RoutingConfig
from knn_moe.errors import AttachError, ConfigError, MemoryMismatchError, RouterNotCalledError
from knn_moe.explain.explain import Describer, explain_sequences, split_sequences, tokenize
from knn_moe.explain.explanation import Explanation
from knn_moe.inference.gate import open_gate
from knn_moe.inference.history import TokenHistory
from knn_moe.inference.hooks import LayerStats, RecallHook, Rows, TokenMask
from knn_moe.inference.language_head import Head, install_heads, make_head
from knn_moe.memory.memory import RoutingMemory
from knn_moe.recall.recall import LayerRecall, RouterCall, layer_gammas, layer_widths
from knn_moe.routers.find import Router, find_routers
from knn_moe.routers.fingerprint import identify
from knn_moe.routers.intercept import chooses_top_logits, find_hook
from knn_moe.routers.model_state import forget_compiled_graphs, unwrap


def attach(
    model: nn.Module,
    memory: RoutingMemory,
    config: RoutingConfig | None = None,
    *,
    force: bool = False,
) -> Routing:
    """Let every router of `model` lean on `memory` until the handle is detached.

    Use the handle as a context manager, or call its `detach()`. Without a config, the memory's
    own is used. `force` attaches a memory that was built for another model of the same shape.
    """
    config = config or memory.routing
    check_free(model)
    return Routing(model, memory, config, routers_for(model, memory, config, force=force))


def check_free(model: nn.Module) -> None:
    """Refuse a model with a memory on it."""
    for router in find_routers(model):
        if find_hook(router) is not None:
            raise AttachError(
                f"{type(model).__name__} has a memory attached already (at {router.name!r}). "
                f"Detach it first; merge() makes one memory of several, attach_all() puts several "
                f"on."
            )


def routers_for(
    model: nn.Module, memory: RoutingMemory, config: RoutingConfig, *, force: bool
) -> list[Router]:
    """The routers that a memory goes on, if it is used so; refused where it does not belong."""
    if config.drawn is None and memory.routing.drawn is not None:
        raise ConfigError(
            "This memory is a control, used with cases drawn at random, and the config given would "
            "recall the nearest: give it as dataclasses.replace(memory.routing, …)."
        )
    if not force:
        check_belongs(model, memory)
    return _choose(find_routers(model), memory, config)


def recall_hook(
    router: Router,
    memory: RoutingMemory,
    config: RoutingConfig,
    mask: TokenMask,
    rows: Rows | None = None,
) -> RecallHook:
    """The hook of one layer's memory, on its router's device."""
    device = router.device
    gammas = layer_gammas(memory, router.layer, config, device)
    kernel = layer_widths(gammas.joint, router.layer, config)
    ratio = gammas.ratio(memory.provenance)
    layer = memory.layers[router.layer]
    gate = open_gate(router, layer, config)
    kernels_count = config.stats and device.type == "cuda" and gate is None
    top = router.top_k if kernels_count and chooses_top_logits(router) else 0
    try:
        recall = LayerRecall(layer, kernel, config, device, count_top=top, ratio=ratio)
    except torch.OutOfMemoryError:
        raise AttachError(
            f"The memory ({memory.nbytes / 1e9:,.1f} GB) does not fit on {device} beside the "
            f'model. Compress it (knn-moe compress), use RoutingConfig(index="fast"), or attach '
            f"fewer layers with RoutingConfig(layers=…)."
        ) from None
    return RecallHook(router, recall, mask, count_changes=config.stats, gate=gate, rows=rows)


class Handle:
    """What is on a model: hooks, which `detach` takes off again."""

    _mask: TokenMask
    _heads: list[Head]
    _handles: list[RemovableHandle]

    def recall_hooks(self) -> Iterable[RecallHook]:
        """Of every router that is asked."""
        raise NotImplementedError

    def detach(self) -> None:
        """Take it off. Does nothing the second time.

        Raises if the model ran and a router was never asked, so that nobody mistakes a memory
        without effect for one that did not help.
        """
        if not self._handles:
            return
        self._remove()
        if self._mask.ran():
            self._check_called()
            self._check_heads()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for hook in self.recall_hooks():
            hook.take_inputs()
        self._handles = []

    def _check_heads(self) -> None:
        if any(head.hook.rows.asked and not head.ran for head in self._heads):
            raise RouterNotCalledError(
                "The model ran, and its logits never came to the memory's head: call the model "
                "itself, not its forward or its decoder alone, or leave out head=."
            )

    def _check_called(self) -> None:
        missed = [hook.router.name for hook in self.recall_hooks() if not hook.was_called()]
        if missed:
            self._remove()
            raise RouterNotCalledError(
                f"The model ran without calling {_names(missed)}, so the memory had no effect "
                f"there and was taken off. A quantised or fused block may go around the router: "
                f"load the model without it (for GPT-OSS: Mxfp4Config(dequantize=True))."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.detach()
        else:
            self._remove()


class Routing(Handle):
    """The handle of an attached memory. Attached on creation; `detach` undoes it."""

    def __init__(
        self, model: nn.Module, memory: RoutingMemory, config: RoutingConfig, routers: list[Router]
    ) -> None:
        self.memory = memory
        self.config = config
        self._model = model
        self._mask = TokenMask(model, routers)
        self._history = TokenHistory(self._mask)
        self._hooks = [
            recall_hook(router, memory, config, self._mask) for router in routers if len(memory)
        ]
        self._heads = make_head(self._hooks, memory, config)
        forget_compiled_graphs()
        self._handles = [handle for hook in self._hooks for handle in hook.install()]
        self._handles += install_heads(model, self._heads)
        self._handles += self._history.install() + self._mask.install(self._check_called)

    def recall_hooks(self) -> list[RecallHook]:
        return self._hooks

    def stats(self) -> dict[int, LayerStats]:
        """Per layer: calls, tokens, mean λ, and the share of tokens whose experts changed."""
        return {hook.router.layer: hook.stats() for hook in self._hooks}

    def explain(
        self,
        input_ids: Tensor | str | None = None,
        attention_mask: Tensor | None = None,
        *,
        tokenizer: Any = None,
        last: int | None = None,
    ) -> Explanation:
        """Per token and layer: the case recalled, its text, distance, λ, and the experts that came
        in and went out, with what became of their logits.

        Of token ids, of a text, or, without either, of what the model read last: the prompt and
        what it generated, but for the very last token, which it never read. It is read once more,
        each row by itself, uncompiled; `stats()` does not count that. Without a tokenizer texts
        are numbers. `last`: only as many tokens, from the end.
        Shapes: input_ids, attention_mask [T] or [B, T].
        """
        if last is not None and last < 1:
            raise ConfigError(f"last must be at least 1, got {last}.")
        if input_ids is None:
            sequences = self._history.sequences(_ends(self._model))
        else:
            if isinstance(input_ids, str):
                input_ids = tokenize(input_ids, tokenizer)
            sequences = split_sequences(input_ids, attention_mask)
        as_found = replace(self.config, gamma=None)
        usual = {
            hook.router.layer: layer_gammas(
                self.memory, hook.router.layer, as_found, hook.router.device
            ).joint
            for hook in self._hooks
        }
        describer = Describer(self.memory.provenance, usual, tokenizer)
        with self._aside():
            return explain_sequences(self._model, self, sequences, describer, last)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """While inside, what runs is neither counted nor remembered."""
        counts = [self._mask.counts.sums, *(hook.counts.sums for hook in self._hooks)]
        before = [sums.clone() for sums in counts]
        self._history.paused = True
        try:
            yield
        finally:
            self._history.paused = False
            for sums, earlier in zip(counts, before, strict=True):
                sums.copy_(earlier)

    @contextmanager
    def observed(self, observer: Callable[[RouterCall], None]) -> Iterator[None]:
        """While inside, hand each router call to `observer`, after its experts are chosen."""
        if not self._handles:
            raise AttachError("The memory is not attached any more: attach it again to observe it.")
        before = [hook.observer for hook in self._hooks]
        for hook in self._hooks:
            hook.observer = observer
        try:
            yield
        finally:
            for hook, earlier in zip(self._hooks, before, strict=True):
                hook.observer = earlier

    def __repr__(self) -> str:
        state = "attached" if self._handles else "detached"
        return f"Routing({state}, {len(self._hooks)} layers, {self.memory!r})"


def check_belongs(model: nn.Module, memory: RoutingMemory) -> None:
    """Refuse a memory that was built for another model."""
    identity = identify(model, find_routers(model))
    if identity.fingerprint != memory.base_model.fingerprint:
        raise MemoryMismatchError(
            f"This memory was built for {memory.base_model}, and the model is {identity}. "
            f"Build one for this model, or, if you know they belong together, force it "
            f"(force=True, --force)."
        )


def _choose(routers: list[Router], memory: RoutingMemory, config: RoutingConfig) -> list[Router]:
    """The routers to attach to: those of the chosen layers, each fitting its layer's memory, but
    for those whose memory is not trusted at all."""
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
    return [by_layer[index] for index in wanted if config.for_layer(index).confidence_factor > 0]


def _ends(model: nn.Module) -> tuple[int, ...]:
    """The tokens after which `generate` takes a sequence to be done."""
    settings = getattr(unwrap(model), "generation_config", None)
    ends = getattr(settings, "eos_token_id", None)
    return tuple(ends) if isinstance(ends, list | tuple) else () if ends is None else (ends,)


def _names(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more routers"
