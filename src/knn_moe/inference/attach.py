"""Put a memory on a model and take it off again.

`attach` installs hooks and nothing else: no module is replaced, no weight or buffer is touched.
Knows the model's structure through routers/; what is computed is recall/'s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from knn_moe.config import RoutingConfig
from knn_moe.errors import AttachError, ConfigError, MemoryMismatchError, RouterNotCalledError
from knn_moe.explain.explain import Describer, explain_sequences, split_sequences, tokenize
from knn_moe.explain.explanation import Explanation
from knn_moe.inference.arguments import (
    MemoryLike,
    check_config,
    check_memory,
    check_model,
    open_memory,
)
from knn_moe.inference.forward_pass import ForwardPass
from knn_moe.inference.hidden_states import check_tokens, has_hidden_state_hook
from knn_moe.inference.history import TokenHistory
from knn_moe.inference.hooks import HookStack, RecallHook, Selection
from knn_moe.inference.language_head import HeadHooks, make_head
from knn_moe.inference.stats import RoutingStats
from knn_moe.memory.memory import RoutingMemory
from knn_moe.recall.layer import LayerRecall, RouterCall, layer_gamma
from knn_moe.recall.neighbours import Widths
from knn_moe.routers.find import Router, find_routers
from knn_moe.routers.fingerprint import identify, matches_sketch
from knn_moe.routers.intercept import chooses_top_logits, find_hook
from knn_moe.routers.model_state import (
    Installable,
    forget_compiled_graphs,
    remove_hooks,
    unwrap,
)

_INSTALLING: Final = threading.Lock()  # so that of two threads that attach one is refused


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


def detach(model: nn.Module) -> None:
    """Take off whatever `attach` or `attach_all` has put on `model`, as the handle itself does.

    For a handle that was not kept. Does nothing if no memory is attached, as a handle does the
    second time: it may stand in a `finally`, or in a notebook's cell that is run again.

    Args:
        model: The model, or one that it is a part of.

    Raises:
        AttachError: What was given is no model.
        RouterNotCalledError: As in the handle's `detach`.
    """
    check_model(model)
    for handle in _handles(model):
        handle.detach()


def _handles(model: nn.Module) -> list[Handle]:
    """Return the handles whose hooks are on `model`."""
    hooks = [hook for part in model.modules() for hook in part._forward_pre_hooks.values()]
    owners = [getattr(hook, "__self__", None) for hook in hooks]
    passes = [owner for owner in owners if isinstance(owner, ForwardPass)]
    return [each.handle for each in passes if isinstance(each.handle, Handle)]


def check_free(model: nn.Module) -> None:
    """Raise AttachError if `model` has a memory on it."""
    for router in find_routers(model):
        if find_hook(router) is not None:
            raise AttachError(
                f"{type(model).__name__} has a memory attached already (at {router.name!r}). "
                f"Detach it first: detach(model). To use several at once, merge them or use "
                f"attach_all()."
            )
    if has_hidden_state_hook(model):
        raise AttachError(
            f"{type(model).__name__} has a language-model head attached already. Detach it first: "
            f"detach(model)."
        )


def routers_for(
    model: nn.Module, memory: RoutingMemory, config: RoutingConfig, *, force: bool
) -> list[Router]:
    """Return the routers that a memory is attached to when it is used as `config` says.

    Raises:
        MemoryMismatchError: The memory belongs to another model.
    """
    if not force:
        check_belongs(model, memory)
    return _choose_routers(find_routers(model), memory, config)


def make_recall_hook(
    router: Router,
    memory: RoutingMemory,
    config: RoutingConfig,
    forward_pass: ForwardPass,
    selection: Selection | None = None,
) -> RecallHook:
    """Make the hook that recalls one layer's memory, on its router's device."""
    device, layer = router.device, memory.layers[router.layer]
    gamma = layer_gamma(memory, router.layer, config, device)
    kernels_count = config.stats and device.type == "cuda"
    top = router.top_k if kernels_count and chooses_top_logits(router) else 0
    try:
        recall = LayerRecall(
            layer,
            Widths.of(gamma, router.layer, config),
            config,
            device,
            random_seed=memory.manifest.random_seed,
            count_top=top,
        )
        recall.check_values_fit(router.weight.dtype)
    except torch.OutOfMemoryError:
        raise AttachError(
            f"The memory ({memory.nbytes / 1e9:,.1f} GB) does not fit on {device} beside the "
            f'model. Compress it (knn-moe compress), use RoutingConfig(index="fast"), or attach '
            f"fewer layers with RoutingConfig(layers=…)."
        ) from None
    return RecallHook(
        router,
        recall,
        forward_pass,
        count_changes=config.stats,
        selection=selection,
        spare_first_token=config.spare_first_token,
    )


class Handle:
    """The hooks that are on a model, until `detach` takes them off."""

    _model: nn.Module
    _pass: ForwardPass
    _heads: HeadHooks | None
    _parts: list[Installable]  # what has hooks, in the order of their installation
    _attached = False

    def recall_hooks(self) -> Iterable[RecallHook]:
        """Return the recall hooks of all routers."""
        raise NotImplementedError

    def installed(self) -> Self:
        """Put all hooks on the model, or none.

        Raises:
            AttachError: Another thread has put hooks on it in the meantime.
        """
        try:
            with _INSTALLING:
                check_free(self._model)
                forget_compiled_graphs()
                self._pass.tell(self._check_called, self._remove_hooks)
                self._pass.handle = self
                for part in self._parts:
                    part.install()
                self._attached = True
            return self
        except BaseException:
            self._remove()
            raise

    def detach(self) -> None:
        """Take the memory off. Does nothing the second time.

        A forward pass that another thread is in ends as it began, and takes the hooks off then.

        Raises:
            RouterNotCalledError: The model ran and bypassed a router, so that the memory had no
                effect there.
        """
        if not self._attached:
            return
        self._remove()
        if int(self._pass.finished.passes) > 0:
            self._check_called()
            self._check_heads()

    def _remove(self) -> None:
        try:
            self._take_off()
        except KeyboardInterrupt:
            self._take_off()
            raise

    def _take_off(self) -> None:
        self._pass.close()
        if self._heads is not None:
            for hook in self._heads.states():
                hook.closed = True
        if not self._pass.runs_elsewhere():
            self._remove_hooks()
        self._attached = False

    def _remove_hooks(self) -> None:
        owners: list[object] = [*self._parts]
        if self._heads is not None:
            owners += self._heads.states()
            for head in self._heads.heads:
                head.forget()
        remove_hooks(self._model, owners)

    def _check_heads(self) -> None:
        heads = () if self._heads is None else self._heads.heads
        if any(not head.called and head.is_used() for head in heads):
            raise RouterNotCalledError(
                "The model ran without calling the memory's language-model head. Call the model "
                "itself, not its forward or its decoder alone, or leave out head=."
            )

    def _check_called(self) -> None:
        missed = [hook.router.name for hook in self.recall_hooks() if not hook.was_called()]
        if missed:
            self._remove()
            raise RouterNotCalledError(
                f"The model ran without calling {_join_names(missed)}, so the memory had no effect "
                f"there and was detached. A quantised or fused block may bypass the router: load "
                f"the model without it (GPT-OSS: Mxfp4Config(dequantize=True))."
            )

    @contextmanager
    def observed(self, observer: Callable[[RouterCall], None]) -> Iterator[None]:
        """Hand each router call of this thread inside to `observer`, after its experts are
        chosen."""
        if not self._attached:
            raise AttachError("The memory is detached. Attach it again to observe it.")
        now = self._pass.now
        before = now.observer
        try:
            now.observer = observer
            yield
        finally:
            now.observer = before

    @contextmanager
    def set_aside(self, observer: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Let the model run as if it had no memory, in this thread inside, and hand the experts
        of each attached layer to `observer`: the layer, and [T, top_k] ascending."""
        now = self._pass.now
        before = now.alone
        try:
            now.alone = observer
            yield
        finally:
            now.alone = before

    def _explain(
        self, used: InUse, sequences: Sequence[Tensor], tokenizer: Any, last: int | None
    ) -> Explanation:
        """Explain what one memory does to each token, in passes that are not counted."""
        as_found = replace(used.config, gamma=None)
        usual = {
            hook.router.layer: layer_gamma(
                used.memory, hook.router.layer, as_found, hook.router.device
            )
            for hook in used.hooks
        }
        describer = Describer(used.memory.provenance, usual, tokenizer)
        now = self._pass.now
        try:
            now.aside = True
            explained = explain_sequences(self._model, used, sequences, describer, last)
        finally:
            now.aside = False
        cases, examples = len(used.memory), used.memory.provenance.num_examples
        described = f"a memory of {cases:,} cases from {examples:,} examples"
        return replace(explained, model=used.memory.base_model.name, memory=described)

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


@dataclass(frozen=True)
class InUse:
    """A memory on a model, as far as an explanation reads it."""

    memory: RoutingMemory
    config: RoutingConfig
    hooks: Sequence[RecallHook]
    handle: Handle

    def stats(self) -> RoutingStats:
        """Return the stats by layer."""
        return RoutingStats({hook.router.layer: hook.stats() for hook in self.hooks})

    def observed(self, observer: Callable[[RouterCall], None]) -> AbstractContextManager[None]:
        """As of the handle."""
        return self.handle.observed(observer)

    def set_aside(self, observer: Callable[[int, Tensor], None]) -> AbstractContextManager[None]:
        """As of the handle."""
        return self.handle.set_aside(observer)


def read_sequences(
    input_ids: Tensor | str, attention_mask: Tensor | None, tokenizer: Any
) -> list[Tensor]:
    """Return the tokens to explain, each sequence without padding. Shape [n] each."""
    if isinstance(input_ids, str):
        input_ids = tokenize(input_ids, tokenizer)
    return split_sequences(input_ids, attention_mask)


def check_last(last: int | None) -> None:
    """Raise ConfigError if an explanation is to have no tokens."""
    if last is not None and last < 1:
        raise ConfigError(f"last must be at least 1, got {last}.")


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
        self._parts = [HookStack([hook], self._pass) for hook in self._hooks]
        self._parts += [self._heads] if self._heads is not None else []
        self._parts += [self._history, self._pass]

    def recall_hooks(self) -> list[RecallHook]:
        return self._hooks

    def stats(self) -> RoutingStats:
        """Return calls, tokens, mean λ and the share of tokens whose experts changed, by layer.

        A mapping from layers to their numbers, which a notebook and `print` show as a table.
        """
        return RoutingStats({hook.router.layer: hook.stats() for hook in self._hooks})

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
            f"Build one for this model. If you know that they belong together, force it "
            f"(force=True, --force)."
        )
    check_tokens(model, memory)


def _choose_routers(
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


def _join_names(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more routers"
