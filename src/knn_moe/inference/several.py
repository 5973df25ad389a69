"""Several memories on one model, chosen for each call or for each row of a batch.

    with attach_all(model, {"medicine": medicine, "law": law}) as routing:
        with routing.using("law"):
            model.generate(**inputs)
        with routing.using(["law", None, "medicine"]):  # three rows; None: the model alone
            model.generate(**batch)

Each has its own γ, widths, index and layers. A row is routed by its own memory and by no other, or
by the model alone. Knows handles and hooks; nothing of how a memory works.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from knn_moe.config import RoutingConfig
from knn_moe.errors import AttachError, ConfigError
from knn_moe.inference.attach import Handle, check_free, make_recall_hook, routers_for
from knn_moe.inference.hooks import HookStack, LayerStats, RecallHook, RowSelection, TokenMask
from knn_moe.inference.language_head import Head, install_heads, make_head
from knn_moe.memory.memory import RoutingMemory
from knn_moe.routers.find import find_routers
from knn_moe.routers.model_state import forget_compiled_graphs
from knn_moe.support.registry import unknown_name


def attach_all(
    model: nn.Module,
    memories: Mapping[str, RoutingMemory],
    configs: Mapping[str, RoutingConfig] | None = None,
    *,
    force: bool = False,
) -> Memories:
    """Put several memories on `model`, by name; none is used until `using` says which.

    Args:
        model: The model that the memories were built for.
        memories: The memories by name.
        configs: How memories are used, by name. Others are used as they themselves say.
        force: As in `attach`.

    Returns:
        The handle: a context manager with `using()`, `stats()` and `detach()`.

    Raises:
        AttachError, MemoryMismatchError, ConfigError: As in `attach`.
    """
    if not memories:
        raise ConfigError("attach_all needs at least one memory, by name.")
    configs = configs or {}
    unknown = [name for name in configs if name not in memories]
    if unknown:
        raise ConfigError(unknown_name("memory in configs", unknown[0], memories))
    check_free(model)
    return Memories(model, memories, configs, force=force)


class Memories(Handle):
    """The handle of several attached memories. It attaches on creation; `detach` undoes that."""

    def __init__(
        self,
        model: nn.Module,
        memories: Mapping[str, RoutingMemory],
        configs: Mapping[str, RoutingConfig],
        *,
        force: bool,
    ) -> None:
        self.memories = dict(memories)
        self._mask = TokenMask(model, find_routers(model))
        self._selections = {name: RowSelection(empty=True) for name in memories}
        self._chosen: str | list[str | None] | None = None
        self._hooks: dict[str, list[RecallHook]] = {}
        self._heads: list[Head] = []
        for name, memory in memories.items():
            config = configs.get(name, memory.routing)
            routers = routers_for(model, memory, config, force=force)
            self._hooks[name] = [
                make_recall_hook(router, memory, config, self._mask, self._selections[name])
                for router in routers
                if len(memory)
            ]
            self._heads += make_head(
                model, self._hooks[name], memory, config, self._selections[name]
            )
        forget_compiled_graphs()
        self._handles = self._install() + install_heads(model, self._heads)

    def _install(self) -> list[RemovableHandle]:
        by_router: dict[str, list[RecallHook]] = {}
        for hook in self.recall_hooks():
            by_router.setdefault(hook.router.name, []).append(hook)
        handles = [handle for hooks in by_router.values() for handle in HookStack(hooks).install()]
        handles.append(self._mask.stack.register_forward_pre_hook(self._before))
        return handles + self._mask.install(self._check_called)

    def recall_hooks(self) -> list[RecallHook]:
        return [hook for hooks in self._hooks.values() for hook in hooks]

    def _before(self, module: nn.Module, args: object) -> None:
        """Remember which memories some row of this run uses."""
        for selection in self._selections.values():
            selection.used |= not selection.empty

    @contextmanager
    def using(self, choice: str | Sequence[str | None] | None) -> Iterator[None]:
        """Choose the memory that rows use inside.

        Args:
            choice: The name of a memory for all rows, or a name or None for each row. None: the
                model alone.

        Raises:
            AttachError: The memories are detached.
            ConfigError: There is no memory of such a name.
        """
        if not self._handles:
            raise AttachError("The memories are detached. Attach them again to use one.")
        names = [choice] if choice is None or isinstance(choice, str) else list(choice)
        if not names:
            raise ConfigError("using() got an empty list. Give a name or None for each row.")
        for name in names:
            if name is not None and name not in self.memories:
                raise ConfigError(unknown_name("memory", name, self.memories))
        before = self._chosen
        self._choose(choice if choice is None or isinstance(choice, str) else names)
        try:
            yield
        finally:
            self._choose(before)

    def _choose(self, choice: str | list[str | None] | None) -> None:
        self._chosen = choice
        names = choice if isinstance(choice, list) else [choice]
        for name, selection in self._selections.items():
            selection.choose(torch.tensor([one == name for one in names]))

    def stats(self) -> dict[str, dict[int, LayerStats]]:
        """Return the stats of each memory by layer, over the rows that used it."""
        return {
            name: {hook.router.layer: hook.stats() for hook in hooks}
            for name, hooks in self._hooks.items()
        }

    def __repr__(self) -> str:
        state = "attached" if self._handles else "detached"
        return f"Memories({state}, {', '.join(self.memories)})"
