"""Record and replace a router's logits while its own forward does the gating (π, §3).

A router computes logits = F.linear(x, W) and then gates them in its family's way. Its input is
handed to it as a `Watched` tensor, which passes what is computed from it to a `Watch`, up to that
linear map. The watch hands (x, logits) to a callback and replaces the logits by what the callback
returns. No gating is written here, no module is replaced, and a callback that returns the logits
it was given leaves the model's output as it is, bit for bit.

All that a call needs hangs on its own input: there is nothing to take back after an exception or
an interrupt, and threads do not meet.

Knows hooks and tensors; knows nothing of memories or gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Generic, NoReturn, SupportsIndex, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from knn_moe.errors import AttachError, UnsupportedModelError
from knn_moe.routers.find import Router

_SEQUENCES: Final = (list, tuple)
_LINEAR: Final = ("input", "weight")  # F.linear's parameters
_TRIALS: Final = 64  # random rows of logits that show how a router chooses
State = TypeVar("State")
# (router inputs [T, d], logits [T, N]) → logits to use [T, N]
Callback: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class Watched(Tensor):
    """A tensor whose torch functions go through its watch. It shares its data with `plain`."""

    plain: Tensor
    watch: Watch

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        watch = None
        values = []
        for value in args:  # spelled out: this runs several times in each call of a router
            if type(value) is Watched:
                watch, value = value.watch, value.plain
            elif isinstance(value, _SEQUENCES):
                watch, value = watch or find_watch(value), plain(value)
            values.append(value)
        if kwargs:
            watch = watch or find_watch(kwargs.values())
            kwargs = {name: plain(value) for name, value in kwargs.items()}
        else:
            kwargs = {}
        return func(*values, **kwargs) if watch is None else watch.run(func, values, kwargs)


def plain(value: Any) -> Any:
    """Return `value` without watches: a tensor, a list or tuple of them, or anything else."""
    if type(value) is Watched:
        return value.plain
    if isinstance(value, _SEQUENCES) and find_watch(value) is not None:
        return type(value)([plain(part) for part in value])
    return value


def find_watch(values: Iterable[Any]) -> Watch | None:
    """Return the watch of the first watched tensor among `values`, or in lists among them."""
    for value in values:
        if type(value) is Watched:
            return value.watch
        if isinstance(value, _SEQUENCES):
            found = find_watch(value)
            if found is not None:
                return found
    return None


class Watch:
    """One call of a router, whose linear map's result goes through a callback.

    In a router's own forward this is the first F.linear. In the forward of a block that computes
    the logits itself, it is the F.linear with the router's weight.

    Args:
        router: The router whose forward is called.
        callback: (inputs [T, d], logits [T, N]) → the logits to use [T, N].
    """

    def __init__(self, router: Router, callback: Callback) -> None:
        self.router = router
        self.callback = callback
        self.logits: Tensor | None = None  # [T, N], what the callback returned

    def over(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the forward with their tensors watched."""
        watched = {name: self._over(plain(value)) for name, value in kwargs.items()}
        return tuple([self._over(plain(value)) for value in args]), watched

    def _over(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            try:
                watched = value.as_subclass(Watched)
            except RuntimeError:  # it dispatches in its own way
                raise UnsupportedModelError(
                    f"Router {self.router.name!r} was called with a {type(value).__name__}, whose "
                    f"logits cannot be replaced. Call the model with plain tensors."
                ) from None
            watched.plain = value
            watched.watch = self
            return watched
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            return type(value)([self._over(part) for part in value])
        return value

    def run(self, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a torch function whose arguments were watched, and watch its result."""
        result = func(*args, **kwargs)
        if self.logits is not None:
            return result
        if func is F.linear:
            inputs, weight = [*args, *(kwargs[name] for name in _LINEAR[len(args) :])][:2]
            if self.router.scope is self.router.module or weight is self.router.weight:
                return self._replace(inputs, result)
        return self._over(result)

    def _replace(self, inputs: Tensor, result: Tensor) -> Tensor:
        if result.ndim == 2 and inputs.ndim == 2:
            replaced = self.logits = self.callback(inputs, result)
        else:
            own = result.reshape(-1, self.router.num_experts)
            self.logits = self.callback(inputs.reshape(-1, self.router.hidden_size), own)
            replaced = result if self.logits is own else self.logits.reshape_as(result)
        return replaced if replaced.dtype == result.dtype else replaced.to(result.dtype)


def run_router(
    router: Router, callback: Callback, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return the output of the router's own forward on the logits that `callback` returns."""
    args, options = Watch(router, callback).over(args, kwargs)
    return plain(router.module.forward(*args, **options))


class NotCopied:
    """Something on a model that cannot be copied or pickled with it."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise AttachError(
            "A model with an attached memory cannot be copied, pickled or saved whole. Detach the "
            "memory first, or save the weights alone (save_pretrained, state_dict)."
        )


class PerThread(threading.local, Generic[State]):
    """Something that each thread has its own of, as `state`."""

    def __init__(self, make: Callable[[], State]) -> None:
        self.state = make()


class _Inputs:
    kept: Tensor | None = None


class KeepsInputs(NotCopied):
    """Keeps inputs [..., d] until the end of the model's forward, for each thread by itself."""

    def __init__(self) -> None:
        self._inputs = PerThread(_Inputs)

    def keep_inputs(self, inputs: Tensor) -> None:
        """Keep the inputs of this call."""
        self._inputs.state.kept = inputs.detach()

    def take_inputs(self) -> Tensor | None:
        """Return the inputs that this thread's last call kept, and forget them."""
        state = self._inputs.state
        inputs, state.kept = state.kept, None
        return inputs


class RouterHook(NotCopied):
    """Two module hooks that watch one router's forward.

    Args:
        router: The router whose logits go through `callback`.
        callback: (inputs [T, d], logits [T, N]) → the logits to use [T, N].
    """

    def __init__(self, router: Router, callback: Callback) -> None:
        self.router = router
        self.callback = callback

    @property
    def closed(self) -> bool:
        """Whether the hook leaves every call alone, until it is removed."""
        return False

    def watch(self) -> Watch | None:
        """Return the watch over a call that begins; None: leave it alone."""
        return Watch(self.router, self.callback)

    # A hook that another thread is just removing may be called without its last argument.
    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Hand the router a watched input."""
        watch = None if kwargs is None else self.watch()
        return None if watch is None or kwargs is None else watch.over(args, kwargs)

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any = None
    ) -> Any:
        """Check that the logits went through the callback."""
        watch = None if output is None else find_watch((*args, *kwargs.values()))
        if watch is None:
            return None
        if not torch.compiler.is_compiling():
            release((*args, *kwargs.values()))
        if watch.logits is None:
            raise UnsupportedModelError(
                f"Router {self.router.name!r} computed its logits without torch.nn.functional."
                f"linear, so they cannot be replaced. If a fused kernel computes them, load the "
                f"model without it (use_kernels=False)."
            )
        return self.finish(watch, module, args, kwargs, plain(output))

    def before_experts(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Hand the experts of a block that computes the logits itself plain tensors."""
        if kwargs is None:
            return None
        return plain(args), {name: plain(value) for name, value in kwargs.items()}

    def finish(
        self,
        watch: Watch,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        """Return what the router returns: its output, unless a subclass has more to do."""
        return output

    def install(self) -> list[RemovableHandle]:
        """Put the hooks on the module that computes the logits; its handles take them off."""
        scope = self.router.scope
        handles = [
            scope.register_forward_pre_hook(self.before, with_kwargs=True),
            scope.register_forward_hook(self.after, prepend=True, with_kwargs=True),
        ]
        experts = getattr(scope, "experts", None)
        if scope is not self.router.module and isinstance(experts, nn.Module):
            handles.append(experts.register_forward_pre_hook(self.before_experts, with_kwargs=True))
        return handles


def release(values: Iterable[Any]) -> None:
    """Make plain tensors of watched ones, in place: other hooks of the module get them too."""
    for value in values:
        if isinstance(value, Watched):
            value.__dict__.clear()
            value.__class__ = Tensor  # type: ignore[assignment]


def find_hook(router: Router) -> RouterHook | None:
    """Return this library's hook on the router, or None if it has none now."""
    for hook in router.scope._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, RouterHook) and not owner.closed:
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
        output = run_router(router, lambda _, own: trial.to(own.dtype), (inputs,), {})
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
