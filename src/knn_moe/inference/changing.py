"""Several memories on one model, which come and go while it runs: a server's.

Knows what `Memories` knows. Hooks are on every router from the beginning, so that a memory comes
and goes by replacing a list.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from knn_moe.config import RoutingConfig
from knn_moe.errors import ConfigError
from knn_moe.inference.handle import check_free
from knn_moe.inference.hooks import HookStack, RecallHook
from knn_moe.inference.language_head import Head, HeadHooks
from knn_moe.inference.several import Memories
from knn_moe.memory.memory import RoutingMemory
from knn_moe.routers.find import find_routers
from knn_moe.routers.model_state import remove_hooks


@dataclass(frozen=True)
class OpenedMemory:
    """A memory with its hooks, on the model's devices, which no router calls yet."""

    name: str
    memory: RoutingMemory
    config: RoutingConfig
    hooks: list[RecallHook]
    heads: list[Head]


class ChangingMemories(Memories):
    """The handle of memories that come and go; at first there are none.

    Args:
        model: The model, which has no memory attached.

    Raises:
        AttachError: It has one.
    """

    def __init__(self, model: nn.Module) -> None:
        check_free(model)
        super().__init__(model, {}, {}, force=False)
        self._stack_of = {
            router.name: HookStack(router, (), self._pass) for router in find_routers(model)
        }
        self._all_heads: list[Head] = []
        self._heads = HeadHooks(model, self._all_heads, self._pass)
        self._parts = [*self._stack_of.values(), self._heads, self._pass]

    def open(
        self, name: str, memory: RoutingMemory, config: RoutingConfig, *, force: bool = False
    ) -> OpenedMemory:
        """Prepare a memory. This takes the time; the model is not touched.

        Raises:
            AttachError, MemoryMismatchError, MemoryFormatError, ConfigError: As in `attach`.
        """
        if name in self.memories:
            raise ConfigError(f"There is a memory {name!r} already. Choose another name.")
        hooks, heads = self._make_hooks(name, memory, config, force=force)
        return OpenedMemory(name, memory, config, hooks, heads)

    def add(self, opened: OpenedMemory) -> None:
        """Let routers call a memory. To be called while no forward pass runs."""
        for hook in opened.hooks:
            stack = self._stack_of[hook.router.name]
            stack.hooks = (*stack.hooks, hook)
        for head in opened.heads:
            self._all_heads.append(head)
            if head.states is not None:
                head.states.install()
        self._hooks[opened.name] = opened.hooks
        self._configs[opened.name] = opened.config
        self.memories[opened.name] = opened.memory
        self._join()

    def remove(self, name: str) -> None:
        """Take a memory off. To be called while no forward pass runs, and after the last that
        uses it."""
        gone = self._hooks.pop(name)
        del self.memories[name]
        for stack in self._stack_of.values():
            stack.hooks = tuple(hook for hook in stack.hooks if hook not in gone)
        for head in list(self._all_heads):
            if head.selection is not None and head.selection.name == name:
                self._all_heads.remove(head)
                head.forget()
                if head.states is not None:
                    remove_hooks(self._model, [head.states])
        self._pass.used.pop(name, None)
        self._join()

    def _join(self) -> None:
        """Let distilled memories be recalled together, in their new number."""
        self._slots.clear()
        for stack in self._stack_of.values():
            by_name = {hook.selection.name or "": hook for hook in stack.hooks}
            stack.together = self._together(by_name)
        self._unused = self._choose([None])
