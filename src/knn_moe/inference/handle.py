"""The handle of what is attached to a model: hooks that it puts on, and takes off again.

Knows passes and hooks; nothing of how a memory works. `detach(model)` finds the handle that nobody
kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Self

from torch import Tensor, nn

from knn_moe.config import RoutingConfig
from knn_moe.errors import AttachError, ConfigError, RouterNotCalledError
from knn_moe.explain.explain import Describer, explain_sequences, split_sequences, tokenize
from knn_moe.explain.explanation import Explanation
from knn_moe.inference.arguments import check_model
from knn_moe.inference.forward_pass import ForwardPass
from knn_moe.inference.hidden_states import has_hidden_state_hook
from knn_moe.inference.hooks import RecallHook
from knn_moe.inference.language_head import HeadHooks
from knn_moe.inference.stats import RoutingStats
from knn_moe.memory.memory import RoutingMemory
from knn_moe.recall.layer import RouterCall, layer_gamma
from knn_moe.routers.find import find_routers
from knn_moe.routers.intercept import find_hook
from knn_moe.routers.model_state import Installable, forget_compiled_graphs, remove_hooks

_INSTALLING: Final = threading.Lock()  # so that of two threads that attach one is refused


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
        describer = self._describer(used, tokenizer)
        with self._uncounted():
            explained = explain_sequences(self._model, used, sequences, describer, last)
        cases, examples = len(used.memory), used.memory.provenance.num_examples
        described = f"a memory of {cases:,} cases from {examples:,} examples"
        return replace(explained, model=used.memory.base_model.name, memory=described)

    def _describer(self, used: InUse, tokenizer: Any, *, cases: bool = True) -> Describer:
        as_found = replace(used.config, gamma=None)
        usual = {
            hook.router.layer: layer_gamma(
                used.memory, hook.router.layer, as_found, hook.router.device
            )
            for hook in used.hooks
        }
        return Describer(used.memory.provenance, usual, tokenizer, cases=cases)

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """Neither count nor remember the passes of this thread inside."""
        now = self._pass.now
        try:
            now.aside = True
            yield
        finally:
            now.aside = False

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
        return RoutingStats.of(self.hooks)

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


def _join_names(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more routers"
