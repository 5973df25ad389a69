"""Record and replace a router's logits while its own forward does the gating (π, §3).

A router computes logits = F.linear(x, W) and then gates them in its family's way. For the length
of that forward a torch-function mode stands between: it hands (x, logits) to a callback and puts
the callback's answer in the logits' place. No gating is written here, no module is swapped, and a
callback that returns the logits it was given leaves the model as it was, bit for bit.

Knows hooks and modes; nothing of memories or of gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from knn_moe.errors import UnsupportedModelError
from knn_moe.routers.find import Router

_TRIALS: Final = 64  # rows of logits that show how a router chooses
# (router inputs [T, d], logits [T, N]) → logits to use [T, N]
Callback: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class ReplaceLogits(TorchFunctionMode):
    """While active, pass the router's linear map through a callback; everything else as it is.

    In a router's own forward the first F.linear is the one. In a forward that computes the logits
    around the router (`by_weight`), it is the F.linear with the router's weight. `brief`: nobody
    else wants to see what the router does after it.
    """

    def __init__(self, router: Router, callback: Callback, *, brief: bool = False) -> None:
        self.router = router
        self.callback = callback
        self.by_weight = router.scope is not router.module
        self.brief = brief and not self.by_weight
        self.done = False
        self._rest: AbstractContextManager[None] | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if self.done or func is not F.linear:
            return result
        if self.by_weight and args[1] is not self.router.weight:
            return result
        self.done = True
        inputs = args[0]
        flat = result.ndim == 2 and inputs.ndim == 2
        if flat:
            replaced = self.callback(inputs, result)
        else:
            logits = result.reshape(-1, self.router.num_experts)
            replaced = self.callback(inputs.reshape(-1, self.router.hidden_size), logits)
            if replaced is logits:
                replaced = result
        if self.brief and not torch.compiler.is_compiling():
            self._let_the_rest_be(result)
        if replaced is result or (flat and replaced.dtype == result.dtype):
            return replaced
        return replaced.to(result.dtype).reshape_as(result)

    def _let_the_rest_be(self, result: Tensor) -> None:
        """What is still to come of the router's forward is none of our business, and eager code
        feels every function that passes through here: none does, if no other mode is active."""
        if type(result) is Tensor and torch._C._len_torch_function_stack() == 0:
            self._rest = torch._C.DisableTorchFunction()
            self._rest.__enter__()

    def __exit__(self, *failure: Any) -> None:
        if self._rest is not None:
            self._rest.__exit__(*failure)
        super().__exit__(*failure)  # type: ignore[no-untyped-call]


class CallState:
    """What a hook keeps between the beginning and the end of one router call."""

    mode: ReplaceLogits | None = None
    # What the callback leaves for the end of the call: its business alone.
    step: Any = None
    # And for the end of the model's, where somebody asked for it: the inputs [T, d].
    read: Tensor | None = None


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.state = CallState()


class RouterHook:
    """The pair of hooks that keeps `ReplaceLogits` active during one router's forward."""

    def __init__(self, router: Router, callback: Callback) -> None:
        self.router = router
        self.callback = callback
        self._threads = _PerThread()
        self._compiled = CallState()

    @property
    def state(self) -> CallState:
        """Of the call under way in this thread. Compiled calls, one at a time, have their own."""
        return self._compiled if torch.compiler.is_compiling() else self._threads.state

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.state.mode = mode = ReplaceLogits(self.router, self.callback, brief=True)
        mode.__enter__()  # type: ignore[no-untyped-call]

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        state = self.state
        mode, state.mode = state.mode, None
        if mode is None:
            return
        mode.__exit__(None, None, None)
        # Called after a failure too, with no output: let the failure itself be heard.
        if output is not None and not mode.done:
            raise UnsupportedModelError(
                f"Router {self.router.name!r} computed its logits without torch.nn.functional."
                f"linear, so they cannot be replaced. A fused kernel may have taken over: load the "
                f"model without it (use_kernels=False)."
            )

    def take_read(self) -> Tensor | None:
        """What the last call left of its inputs, once; it may have been compiled, and this not."""
        states = self.state, self._compiled
        read = next((state.read for state in states if state.read is not None), None)
        for state in states:
            state.read = None
        return read

    def install(self) -> list[RemovableHandle]:
        scope = self.router.scope
        return [
            scope.register_forward_pre_hook(self.before, prepend=True),
            scope.register_forward_hook(
                self.after, prepend=True, with_kwargs=True, always_call=True
            ),
        ]


def hook_on(router: Router) -> RouterHook | None:
    """The hook of this library that is on the router now, if any."""
    for hook in router.scope._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, RouterHook):
            return owner
    return None


@torch.no_grad()
def takes_top(router: Router) -> bool:
    """Whether the router picks the top of its logits, as it is now: tried on shuffled ones.

    Group limits and correction biases bend the order; whatever cannot be tried counts as bent.
    """
    if router.scope is not router.module:
        return False
    draw = torch.Generator().manual_seed(0)
    ranks = [torch.randperm(router.num_experts, generator=draw) for _ in range(_TRIALS)]
    # Eighths apart: exact in bf16 up to 256 experts, and near enough for a softmax to tell apart.
    trial = ((torch.stack(ranks) - router.num_experts // 2) / 8).to(router.device)
    inputs = torch.zeros(_TRIALS, router.hidden_size, device=router.device)
    inputs = inputs.to(router.weight.dtype)
    try:
        with ReplaceLogits(router, lambda _, own: trial.to(own.dtype)):
            output = router.module.forward(inputs)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return False
    chosen = chosen_experts(router, output, torch.zeros_like(trial))
    top = torch.topk(trial, router.top_k, dim=-1).indices.sort(dim=-1).values
    return torch.equal(chosen, top)


def chosen_experts(router: Router, output: Any, logits: Tensor) -> Tensor:
    """The experts a router picked, ascending: from what it returned, else the top of its logits.

    Every router in transformers that bends the order of its logits (group limits, correction
    biases) returns the indices it chose. Shapes: logits [T, N]. Result [T, top_k].
    """
    outputs = output if isinstance(output, tuple) else ()
    for part in outputs:
        if (
            isinstance(part, Tensor)
            and not part.dtype.is_floating_point
            and part.shape == (len(logits), router.top_k)
        ):
            return part.sort(dim=-1).values
    return torch.topk(logits, router.top_k, dim=-1).indices.sort(dim=-1).values
