"""Prompts' last tokens, run again through a model's last layers under given routing logits.

Below the first of these layers nothing depends on the logits. A prompt is read once; what its
earlier tokens left in the cache and what enters the first of the layers is kept, and to run the
last token again costs one token through the layers that are left. Each layer is called with the
very arguments the model called it with, so that no family's attention is written here.

Knows decoder layers, caches and routers; nothing of questions, neighbours or losses to descend.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from knn_moe.errors import RouterNotCalledError, UnsupportedModelError
from knn_moe.routers.dense_gradients import DenseGradientHook
from knn_moe.routers.find import Router, find_routers
from knn_moe.routers.intercept import Callback, RouterHook
from knn_moe.routers.model_state import input_device, unwrap

_GROWING: Final = (DynamicLayer, DynamicSlidingWindowLayer)  # put new tensors in place of the old
_NO_TARGET: Final = -100
_TRIAL: Final = (1, 2, 3, 4, 5)  # tokens of any vocabulary


@dataclass(frozen=True)
class Halted:
    """Prompts read up to the layers that will be run again; S tokens of each go through them: the
    last of the prompt and those of the answer but its last. Shapes: own [B, L, N] fp32, the last
    prompt token's routing logits; logits [B, S, V]; targets [B, S], -100 where none is."""

    own: Tensor
    logits: Tensor
    targets: Tensor
    hidden: Tensor = field(repr=False)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(repr=False)
    passed: Any = field(repr=False)  # the cache as the layers were given it
    past: Any = field(repr=False)  # what was in it then


@dataclass(frozen=True)
class Tail:
    """A model's decoder layers from that of the first of L routers on."""

    model: nn.Module = field(repr=False)
    routers: list[Router]
    stack: nn.Module = field(repr=False)
    layers: list[nn.Module] = field(repr=False)
    gradient: str = "sparse"  # to the routing logits: "sparse" or "dense", as in BuildConfig

    @torch.no_grad()
    def read(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]] | None = None
    ) -> Halted:
        """Read prompts, of any lengths, with as much of their answers as will be scored."""
        tokens = _Tokens.of(prompts, answers or [[]] * len(prompts), input_device(self.model))
        stack: Any = self.stack
        cache = stack(**tokens.before(), use_cache=True).past_key_values
        past = _again(cache)
        own: list[Tensor] = []

        def record(inputs: Tensor, logits: Tensor) -> Tensor:
            own.append(logits.view(len(prompts), -1, logits.shape[-1])[:, 0].float())
            return logits

        with self._overheard() as heard, self._routed([record] * len(self.routers)):
            output = self.model(**tokens.after(), past_key_values=cache, use_cache=True)
        calls = [(args[1:], kwargs) for args, kwargs in heard]
        device = output.logits.device
        return Halted(
            own=torch.stack([part.to(device) for part in own], dim=1),
            logits=output.logits,
            targets=tokens.targets.to(device),
            hidden=heard[0][0][0].clone(),
            calls=calls,
            passed=cache,
            past=past,
        )

    def run(self, halted: Halted, routing: Tensor) -> Tensor:
        """The logits after each of the S tokens, the first of them routed by `routing`. Gradients
        reach `routing`, if they are wanted. Shapes: routing [B, L, N] → [B, S, V]."""
        cache = _again(halted.past)

        def pass_on(value: Any) -> Any:
            return cache if value is halted.passed else value

        x = halted.hidden
        with self._routed([_at_first(routing[:, place]) for place in range(routing.shape[1])]):
            for layer, (args, kwargs) in zip(self.layers, halted.calls, strict=True):
                named = {name: pass_on(value) for name, value in kwargs.items()}
                output = layer(x, *map(pass_on, args), **named)
                x = output[0] if isinstance(output, tuple) else output
        head: Any = unwrap(self.model).get_output_embeddings()
        norm: Any = self.stack.norm
        logits: Tensor = head(norm(x))
        return logits

    def losses(self, halted: Halted, routing: Tensor) -> Tensor:
        """The mean loss of each answer's tokens. Shapes: routing [B, L, N] → [B] fp32."""
        logits = self.run(halted, routing)
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(),
            halted.targets.flatten(),
            ignore_index=_NO_TARGET,
            reduction="none",
        )
        scored = (halted.targets != _NO_TARGET).sum(dim=1)
        return losses.view_as(halted.targets).sum(dim=1) / scored

    @contextmanager
    def _overheard(self) -> Iterator[list[tuple[tuple[Any, ...], dict[str, Any]]]]:
        """The arguments of each layer's call, in their order."""
        heard: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def listen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not args:
                raise _unsupported(self.model)
            heard.append((args, kwargs))

        with ExitStack() as hooks:
            for layer in self.layers:
                hooks.callback(layer.register_forward_pre_hook(listen, with_kwargs=True).remove)
            yield heard

    @contextmanager
    def _routed(self, callbacks: Sequence[Callback]) -> Iterator[None]:
        with ExitStack() as hooks:
            for router, callback in zip(self.routers, callbacks, strict=True):
                dense = self.gradient == "dense" and torch.is_grad_enabled()
                hook = (
                    DenseGradientHook(self.model, router, callback)
                    if dense
                    else RouterHook(router, callback)
                )
                for handle in hook.install():
                    hooks.callback(handle.remove)
            yield

    @contextmanager
    def remixed(self, prompts: Sequence[Sequence[int]], routing: Tensor) -> Iterator[None]:
        """While inside, wherever the model reads these prompts from their beginning, the last token
        of each is routed by `routing`; all others by the routers. Shapes: routing [B, L, N]."""
        ends = _Ends([list(prompt) for prompt in prompts])
        hook = self.stack.register_forward_pre_hook(ends.find, with_kwargs=True)
        with ExitStack() as hooks:
            hooks.callback(hook.remove)
            parts = [ends.replace(routing[:, place]) for place in range(routing.shape[1])]
            hooks.enter_context(self._routed(parts))
            yield
        if not ends.replaced:
            raise RouterNotCalledError(
                f"Router {self.routers[-1].name!r} was never asked about the end of a prompt, so "
                f"nothing was re-mixed: use a model that is not compiled, quantised or fused."
            )


def last_layers(model: nn.Module, count: int, gradient: str = "sparse") -> Tail:
    """The last `count` MoE layers, or all there are, and the dense ones between them."""
    routers = find_routers(model)[-count:]
    names = routers[0].name.split(".")
    for end in range(1, len(names)):
        part = model.get_submodule(".".join(names[:end]))
        if isinstance(part, nn.ModuleList):
            stack = model.get_submodule(".".join(names[: end - 1]))
            tail = Tail(model, routers, stack, list(part)[int(names[end]) :], gradient)
            _check(tail)
            return tail
    raise _unsupported(model)


def _check(tail: Tail) -> None:
    """What runs after the last layer, or beside it, is the family's own: see that nothing does, and
    that gradients pass (some recurrent layers write on what they would need for them)."""
    if not isinstance(getattr(tail.stack, "norm", None), nn.Module):
        raise _unsupported(tail.model)
    with torch.inference_mode(False), torch.enable_grad():
        halted = tail.read([_TRIAL])
        leaf = halted.own.clone().requires_grad_()
        found, wanted = tail.run(halted, leaf).float(), halted.logits.float()
        if found.shape != wanted.shape or (found - wanted).abs().max() > 0.01 * wanted.abs().max():
            raise _unsupported(tail.model)
        try:
            torch.autograd.grad(found.sum(), leaf)
        except RuntimeError:
            raise _unsupported(tail.model) from None


def _unsupported(model: nn.Module) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The last layers of {type(unwrap(model)).__name__} cannot be run by themselves, as C3PO "
        f"needs it: choose another method for this model."
    )


def _again(cache: Any) -> Any:
    """A cache that can be written on and leaves the one it was made of as it is."""
    if getattr(cache, "layers", None) is None:
        return copy.deepcopy(cache)
    again = copy.copy(cache)
    again.layers = [
        copy.copy(layer) if type(layer) in _GROWING else copy.deepcopy(layer)
        for layer in cache.layers
    ]
    return again


def _at_first(routing: Tensor) -> Callback:
    """Replaces the logits of each row's first token. Shapes: routing [B, N], logits [B·S, N]."""

    def replace(inputs: Tensor, logits: Tensor) -> Tensor:
        rows = logits.view(len(routing), -1, logits.shape[-1])
        first = routing.to(logits.device, logits.dtype)[:, None]
        return torch.cat([first, rows[:, 1:]], dim=1).flatten(0, 1)

    return replace


@dataclass(frozen=True)
class _Tokens:
    """Prompts padded on the left, then answers padded on the right, which nothing sees.

    Shapes: ids, mask, places [B, P + S]; targets [B, S].
    """

    ids: Tensor
    mask: Tensor
    places: Tensor
    targets: Tensor

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], device: Any
    ) -> _Tokens:
        # One token before the last at the least, were it padding: there is a cache to go on from.
        before = max(2, *map(len, prompts))
        after = max(1, *map(len, answers))
        ids = torch.zeros(len(prompts), before + after - 1, dtype=torch.long)
        mask = torch.ones_like(ids)
        targets = torch.full((len(prompts), after), _NO_TARGET)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            start = before - len(prompt)
            whole = [*prompt, *answer[:-1]]
            ids[row, start : start + len(whole)] = torch.tensor(whole)
            mask[row, :start] = 0
            targets[row, : len(answer)] = torch.tensor(answer, dtype=torch.long)
        places = (mask.cumsum(dim=1) - 1).clamp(min=0)
        return cls(*(part.to(device) for part in (ids, mask, places, targets)))

    def before(self) -> dict[str, Tensor]:
        """All but the last S tokens, as a model takes them."""
        end = -self.targets.shape[1]
        parts = self.ids[:, :end], self.mask[:, :end], self.places[:, :end]
        return dict(zip(("input_ids", "attention_mask", "position_ids"), parts, strict=True))

    def after(self) -> dict[str, Tensor]:
        start = -self.targets.shape[1]
        parts = self.ids[:, start:], self.mask, self.places[:, start:]
        return dict(zip(("input_ids", "attention_mask", "position_ids"), parts, strict=True))


class _Ends:
    """Where, among the flattened tokens that routers see, the last tokens of prompts are."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self.prompts = prompts
        self.longest = max(map(len, prompts))
        self.replaced = False
        self._found: tuple[list[int], list[int]] | None = None

    def find(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        cache = kwargs.get("past_key_values")
        read_on = cache is not None and int(cache.get_seq_length()) > 0
        self._found = None if read_on or ids is None else self._places(ids)

    def _places(self, ids: Tensor) -> tuple[list[int], list[int]] | None:
        """Places of tokens, and whose they are."""
        count, length = ids.shape
        if (count, length) == (len(self.prompts), self.longest):  # or padded on the left
            return [(row + 1) * length - 1 for row in range(count)], list(range(count))
        found = [
            (row * length + len(prompt) - 1, number)
            for row, line in enumerate(ids.tolist())
            for number, prompt in enumerate(self.prompts)
            if line[: len(prompt)] == prompt
        ]
        # Of equal prompts either will do: a dictionary keeps one.
        unique = dict(found)
        return (list(unique), list(unique.values())) if unique else None

    def replace(self, routing: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Shapes: routing [B, N]."""

        def callback(inputs: Tensor, logits: Tensor) -> Tensor:
            if self._found is None:
                return logits
            places, owners = (torch.tensor(part, device=logits.device) for part in self._found)
            self.replaced = True
            return logits.index_copy(0, places, routing.to(logits)[owners])

        return callback
