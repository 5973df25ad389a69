"""Several memories on one model, chosen for each call or for each row of a batch.

    with attach_all(model, {"medicine": medicine, "law": law}) as routing:
        with routing.using("law"):
            model.generate(**inputs)
        with routing.using(["law", None, "medicine"]):  # three rows; None: the model alone
            model.generate(**batch)
        with routing.using_flat([("law", 9), (None, 1)]):  # sequences of a flat batch, by length
            model(**flat)

Each has its own γ, widths, index and layers. A row is routed by its own memory and by no other, or
by the model alone. A choice belongs to the thread or asyncio task that made it. Knows handles and
hooks; nothing of how a memory works.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from knn_moe.config import RoutingConfig
from knn_moe.errors import AttachError, ConfigError
from knn_moe.explain.explain import Describer
from knn_moe.explain.explanation import Explanation
from knn_moe.explain.trace import TwoRuns, trace_both
from knn_moe.inference.arguments import (
    MemoryLike,
    check_config,
    check_memories,
    check_model,
    open_memory,
)
from knn_moe.inference.attach import make_recall_hook, routers_for
from knn_moe.inference.forward_pass import ForwardPass
from knn_moe.inference.handle import Handle, InUse, check_free, check_last, read_sequences
from knn_moe.inference.hooks import HookStack, RecallHook, Selection
from knn_moe.inference.language_head import Head, HeadHooks, make_head
from knn_moe.inference.rows import Chosen, FlatSlots, FlatTokens, Rows, RowSlots
from knn_moe.inference.stats import RoutingStats, StatsByMemory
from knn_moe.inference.together import RecalledTogether, can_be_together
from knn_moe.memory.memory import RoutingMemory
from knn_moe.routers.find import find_routers
from knn_moe.support.registry import unknown_name


def attach_all(
    model: nn.Module,
    memories: Mapping[str, MemoryLike],
    configs: Mapping[str, RoutingConfig] | None = None,
    *,
    force: bool = False,
) -> Memories:
    """Put several memories on `model`, by name; none is used until `using` says which.

    Args:
        model: The model that the memories were built for.
        memories: The memories by name, each opened or as its folder or hub id.
        configs: How memories are used, by name. Others are used as they themselves say.
        force: As in `attach`.

    Returns:
        The handle: a context manager with `using()`, `explain()`, `stats()` and `detach()`.

    Raises:
        AttachError, MemoryMismatchError, MemoryFormatError, ConfigError: As in `attach`.
    """
    check_model(model)
    check_memories(memories)
    if not memories:
        raise ConfigError("attach_all needs at least one memory, by name.")
    configs = configs or {}
    unknown = [name for name in configs if name not in memories]
    if unknown:
        raise ConfigError(unknown_name("memory in configs", unknown[0], memories))
    for config in configs.values():
        check_config(config)
    check_free(model)
    opened = {name: open_memory(memory) for name, memory in memories.items()}
    return Memories(model, opened, configs, force=force).installed()


@dataclass(eq=False)
class _Choice:
    """What rows use inside a `using`."""

    handle: Memories
    chosen: Chosen
    outer: _Choice | None  # the one around it
    ended: bool = False  # a task that was started inside may outlive it


_CHOICE: Final[ContextVar[_Choice | None]] = ContextVar("knn_moe_choice", default=None)


class Memories(Handle):
    """The handle of several attached memories. `installed` attaches them; `detach` undoes that."""

    def __init__(
        self,
        model: nn.Module,
        memories: Mapping[str, RoutingMemory],
        configs: Mapping[str, RoutingConfig],
        *,
        force: bool,
    ) -> None:
        self.memories = dict(memories)
        self._configs = {name: configs.get(name, each.routing) for name, each in memories.items()}
        self._model = model
        self._thread = threading.get_ident()
        self._pass = ForwardPass(model, find_routers(model), self._chosen)
        self._hooks: dict[str, list[RecallHook]] = {}
        heads: list[Head] = []
        for name, memory in memories.items():
            config = self._configs[name]
            self._hooks[name], own = self._make_hooks(name, memory, config, force=force)
            heads += own
        self._heads = HeadHooks(model, heads, self._pass) if heads else None
        # The memories that are recalled together at some routers, by slot, and where.
        self._slots: list[tuple[list[str], torch.device]] = []
        self._parts = [*self._stacks(), *([self._heads] if self._heads else []), self._pass]
        self._unused = self._choose([None])

    def _make_hooks(
        self, name: str, memory: RoutingMemory, config: RoutingConfig, *, force: bool
    ) -> tuple[list[RecallHook], list[Head]]:
        """Make what puts a memory on the model, and leave the model as it is."""
        selection = Selection(self._pass, name)
        routers = routers_for(self._model, memory, config, force=force)
        hooks = [
            make_recall_hook(router, memory, config, self._pass, selection)
            for router in routers
            if len(memory)
        ]
        return hooks, make_head(self._model, hooks, memory, config, selection)

    def _stacks(self) -> list[HookStack]:
        by_router: dict[str, dict[str, RecallHook]] = {}
        for name, hooks in self._hooks.items():
            for hook in hooks:
                by_router.setdefault(hook.router.name, {})[name] = hook
        return [self._stack(hooks) for hooks in by_router.values()]

    def _stack(self, by_name: Mapping[str, RecallHook]) -> HookStack:
        hooks = list(by_name.values())
        return HookStack(hooks[0].router, hooks, self._pass, self._together(by_name))

    def _together(self, by_name: Mapping[str, RecallHook]) -> RecalledTogether | None:
        """Return what recalls the memories at one router together; None: they cannot be."""
        hooks, together = list(by_name.values()), None
        if can_be_together(hooks):
            slots = list(by_name), hooks[0].router.device
            if slots not in self._slots:
                self._slots.append(slots)
            with suppress(torch.OutOfMemoryError):  # without room, one after the other
                together = RecalledTogether(hooks, self._pass, self._slots.index(slots))
        return together

    def recall_hooks(self) -> list[RecallHook]:
        return [hook for hooks in self._hooks.values() for hook in hooks]

    def _choose(self, names: Sequence[str | None]) -> Chosen:
        """Return the choice of a memory for each row."""
        rows = {
            known: Rows(torch.tensor([one == known for one in names])) for known in self.memories
        }
        return Chosen(rows, [RowSlots(names, *slots) for slots in self._slots])

    def _chosen(self) -> Chosen:
        """Return what was chosen in this thread or task.

        Raises:
            AttachError: Nothing was chosen here.
        """
        choice = _CHOICE.get()
        while choice is not None and choice.handle is not self:
            choice = choice.outer
        if choice is None and threading.get_ident() == self._thread:
            return self._unused
        if choice is None or choice.ended:
            raise AttachError(
                "No memory is chosen in this thread or task. A choice holds only where it was "
                "made: enter routing.using(…) in the thread that calls the model, with None for "
                "the model alone."
            )
        return choice.chosen

    @contextmanager
    def using(self, choice: str | Sequence[str | None] | None) -> Iterator[None]:
        """Choose the memory that rows use inside, in this thread (or asyncio task) alone.

        Args:
            choice: The name of a memory for all rows, or a name or None for each row. None: the
                model alone.

        Raises:
            AttachError: The memories are detached.
            ConfigError: There is no memory of such a name.
        """
        names = [choice] if choice is None or isinstance(choice, str) else list(choice)
        if not names:
            raise ConfigError("using() got an empty list. Give a name or None for each row.")
        self._check_names(names)
        with self._using(self._choose(names)):
            yield

    @contextmanager
    def using_flat(self, sequences: Sequence[tuple[str | None, int]]) -> Iterator[None]:
        """Choose the memory of each token of a flat batch, in this thread (or task) alone.

        A flat batch, as continuous batching makes it, has sequences one after the other in one
        row. Each memory searches its own tokens only.

        Args:
            sequences: The memory and the number of tokens of each sequence, in their order. None:
                the model alone, as for tokens after the last sequence.

        Raises:
            AttachError, ConfigError: As in `using`.
        """
        self._check_names([name for name, _ in sequences])
        owners = [name for name, count in sequences for _ in range(count)]
        rows: dict[str, Rows] = {}
        for name in {name for name, _ in sequences if name is not None}:
            rows[name] = FlatTokens(torch.tensor([owner == name for owner in owners]))
        with self._using(Chosen(rows, [FlatSlots(owners, *slots) for slots in self._slots])):
            yield

    def _check_names(self, names: Sequence[str | None]) -> None:
        if not self._attached:
            raise AttachError("The memories are detached. Attach them again to use one.")
        for name in names:
            if name is not None and name not in self.memories:
                raise ConfigError(unknown_name("memory", name, self.memories))

    @contextmanager
    def _using(self, what: Chosen) -> Iterator[None]:
        chosen = _Choice(self, what, _CHOICE.get())
        try:
            _CHOICE.set(chosen)
            yield
        finally:
            chosen.ended = True
            _CHOICE.set(chosen.outer)

    def explain(
        self,
        name: str,
        input_ids: Tensor | str,
        attention_mask: Tensor | None = None,
        *,
        tokenizer: Any = None,
        last: int | None = None,
    ) -> Explanation:
        """Explain what the memory `name` does to each token, whichever is chosen.

        Args:
            name: The memory.
            input_ids: Token ids [T] or [B, T], or a text.
            attention_mask: As in the `explain` of a single memory.
            tokenizer: As there.
            last: As there.

        Raises:
            AttachError, ConfigError: As in `using`.
        """
        check_last(last)
        with self.using(name):
            sequences = read_sequences(input_ids, attention_mask, tokenizer)
            return self._explain(self._in_use(name), sequences, tokenizer, last)

    def trace(self, name: str, ids: Tensor, first: int) -> TwoRuns:
        """Read a text with the memory `name`, whichever is chosen, and alone. The passes are not
        counted.

        Args:
            name: The memory.
            ids: Token ids without padding. Shape [T].
            first: The first token after which next tokens are wanted.

        Raises:
            AttachError, ConfigError: As in `using`.
        """
        with self.using(name), self._uncounted():
            return trace_both(self._model, self._in_use(name), ids, first)

    def describer(self, name: str, tokenizer: Any, *, cases: bool = True) -> Describer:
        """Return what puts traces of the memory `name` into words."""
        return self._describer(self._in_use(name), tokenizer, cases=cases)

    def _in_use(self, name: str) -> InUse:
        return InUse(self.memories[name], self._configs[name], self._hooks[name], self)

    def stats(self) -> StatsByMemory:
        """Return the stats of each memory by layer, over the rows that used it."""
        hooks = dict(self._hooks)  # other threads may add memories
        return StatsByMemory({name: RoutingStats.of(each) for name, each in hooks.items()})

    def __repr__(self) -> str:
        state = "attached" if self._attached else "detached"
        return f"Memories({state}, {', '.join(self.memories)})"
