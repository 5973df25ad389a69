"""Record and replace a router's logits while its own forward does the gating (π, §3).

A router computes logits = F.linear(x, W) and then gates them in its family's way. During that
forward a torch-function mode hands (x, logits) to a callback and replaces the logits by what the
callback returns. No gating is written here, no module is replaced, and a callback that returns the
logits it was given leaves the model's output as it is, bit for bit.

Knows hooks and modes; knows nothing of memories or gradients.
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

_TRIALS: Final = 64  # random rows of logits that show how a router chooses
# (router inputs [T, d], logits [T, N]) → logits to use [T, N]
Callback: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class ReplaceLogits(TorchFunctionMode):
    """While active, pass the result of the router's linear map through a callback.

    In a router's own forward this is the first F.linear. In the forward of a block that computes
    the logits itself, it is the F.linear with the router's weight.

    Args:
        router: The router whose forward runs while this mode is active.
        callback: (inputs [T, d], logits [T, N]) → the logits to use [T, N].
        stop_after: Intercept nothing after the linear map, for speed, if no other mode is active.
    """

    def __init__(self, router: Router, callback: Callback, *, stop_after: bool = False) -> None:
        self.router = router
        self.callback = callback
        self.by_weight = router.scope is not router.module
        self.stop_after = stop_after and not self.by_weight
        self.done = False
        self._disabled: AbstractContextManager[None] | None = None

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
        if self.stop_after and not torch.compiler.is_compiling():
            self._stop_intercepting(result)
        if replaced is result or (flat and replaced.dtype == result.dtype):
            return replaced
        return replaced.to(result.dtype).reshape_as(result)

    def _stop_intercepting(self, result: Tensor) -> None:
        """Let the rest of the router's forward run at full speed, unless another mode is active."""
        if type(result) is Tensor and torch._C._len_torch_function_stack() == 0:
            self._disabled = torch._C.DisableTorchFunction()
            self._disabled.__enter__()

    def __exit__(self, *failure: Any) -> None:
        if self._disabled is not None:
            self._disabled.__exit__(*failure)
        super().__exit__(*failure)  # type: ignore[no-untyped-call]


class CallState:
    """What a hook keeps between the beginning and the end of one call."""

    mode: ReplaceLogits | None = None
    step: Any = None  # what the callback leaves for the end of the call
    inputs: Tensor | None = None  # [..., d], kept until the end of the model's forward if needed


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.state = CallState()


class HookState:
    """What a hook keeps: for each thread by itself, and for compiled calls together."""

    def __init__(self) -> None:
        self._threads = _PerThread()
        self._compiled = CallState()

    @property
    def state(self) -> CallState:
        """The state of this thread's current call. Compiled calls share one of their own."""
        return self._compiled if torch.compiler.is_compiling() else self._threads.state

    def take_inputs(self) -> Tensor | None:
        """Return the inputs that the last call kept, eager or compiled, and forget them."""
        states = self.state, self._compiled
        inputs = next((state.inputs for state in states if state.inputs is not None), None)
        for state in states:
            state.inputs = None
        return inputs


class RouterHook(HookState):
    """Two module hooks that keep `ReplaceLogits` active during one router's forward.

    Args:
        router: The router whose logits go through `callback`.
        callback: (inputs [T, d], logits [T, N]) → the logits to use [T, N].
    """

    def __init__(self, router: Router, callback: Callback) -> None:
        super().__init__()
        self.router = router
        self.callback = callback

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Start intercepting."""
        self.state.mode = mode = ReplaceLogits(self.router, self.callback, stop_after=True)
        mode.__enter__()  # type: ignore[no-untyped-call]

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Stop intercepting. Runs after a failure too, then with no output."""
        state = self.state
        mode, state.mode = state.mode, None
        if mode is None:
            return
        mode.__exit__(None, None, None)
        if output is not None and not mode.done:
            raise UnsupportedModelError(
                f"Router {self.router.name!r} computed its logits without torch.nn.functional."
                f"linear, so they cannot be replaced. If a fused kernel computes them, load the "
                f"model without it (use_kernels=False)."
            )

    def install(self) -> list[RemovableHandle]:
        """Put the hooks on the module that computes the logits; its handles take them off."""
        scope = self.router.scope
        return [
            scope.register_forward_pre_hook(self.before, prepend=True),
            scope.register_forward_hook(
                self.after, prepend=True, with_kwargs=True, always_call=True
            ),
        ]


def find_hook(router: Router) -> RouterHook | None:
    """Return this library's hook on the router, or None if it has none now."""
    for hook in router.scope._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, RouterHook):
            return owner
    return None


@torch.no_grad()
def chooses_top_logits(router: Router) -> bool:
    """Return whether the router chooses the experts of its largest logits.

    Tries it on random permutations. Group limits and correction biases change the order; a router
    that cannot be tried counts as one that does so.
    """
    if router.scope is not router.module:
        return False
    draw = torch.Generator().manual_seed(0)
    ranks = [torch.randperm(router.num_experts, generator=draw) for _ in range(_TRIALS)]
    # Steps of 1/8 are exact in bf16 up to 256 experts, and a softmax does not saturate on them.
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
    """Return the experts that a router chose, ascending.

    Every router in transformers that changes the order of its logits (group limits, correction
    biases) returns the indices it chose.

    Args:
        router: The router.
        output: What its forward returned.
        logits: The logits it gated, whose largest count if `output` has no indices. Shape [T, N].

    Returns:
        Expert numbers [T, top_k].
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
