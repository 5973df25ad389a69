"""Run the last tokens of prompts again through a model's last layers, with given routing logits.

Nothing below the first of these layers depends on the logits. A prompt is therefore read once; the
cache of its earlier tokens and the input of the first of the layers are kept. Running the last
token again then costs one token through the remaining layers. Each layer is called with the same
arguments with which the model called it, so that this works for the attention of any family.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from knn_moe.equations.losses import IGNORED, target_losses
from knn_moe.errors import RouterNotCalledError, UnsupportedModelError
from knn_moe.routers.dense_gradients import DenseGradientHook
from knn_moe.routers.find import Router, find_routers
from knn_moe.routers.intercept import Callback, RouterHook
from knn_moe.routers.model_state import Installable, input_device, install_hooks, unwrap

# Cache layers that replace their tensors instead of writing on them.
_REPLACING: Final = (DynamicLayer, DynamicSlidingWindowLayer)
_TRIAL: Final = (1, 2, 3, 4, 5)  # tokens of any vocabulary
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a layer


@dataclass(frozen=True)
class PausedPrompts:
    """Prompts that were read up to the layers that will be run again.

    S tokens of each go through these layers: the last of the prompt, and those of the answer except
    its last. Shapes: own_routing [B, L, N] fp32, the routing logits of the last prompt token;
    logits [B, S, V]; targets [B, S], IGNORED where there is none.
    """

    own_routing: Tensor
    logits: Tensor
    targets: Tensor
    hidden: Tensor = field(repr=False)
    calls: list[Call] = field(repr=False)
    passed_cache: Any = field(repr=False)  # the object the layers were called with
    earlier_cache: Any = field(repr=False)  # what it held at that time


@dataclass(frozen=True)
class _PreHook:
    module: nn.Module
    callback: Callable[..., None]

    def install(self) -> Sequence[RemovableHandle]:
        return [self.module.register_forward_pre_hook(self.callback, with_kwargs=True)]


@dataclass(frozen=True)
class LastLayers:
    """A model's decoder layers from that of the first of L routers on."""

    model: nn.Module = field(repr=False)
    routers: list[Router]
    stack: nn.Module = field(repr=False)
    layers: list[nn.Module] = field(repr=False)
    gradient: str = "sparse"  # for the routing logits: "sparse" or "dense", as in BuildConfig

    @torch.no_grad()
    def read(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]] | None = None
    ) -> PausedPrompts:
        """Read prompts of any lengths, with as much of their answers as will be scored."""
        tokens = _PaddedTokens.pad(
            prompts, answers or [[]] * len(prompts), input_device(self.model)
        )
        stack: Any = self.stack
        cache = stack(**tokens.before(), use_cache=True).past_key_values
        earlier = _copy_cache(cache)
        own: list[Tensor] = []
        calls: list[Call] = []

        def record(inputs: Tensor, logits: Tensor) -> Tensor:
            own.append(logits.view(len(prompts), -1, logits.shape[-1])[:, 0].float())
            return logits

        def record_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not args:
                raise _unsupported(self.model)
            calls.append((args, kwargs))

        hooks = [_PreHook(layer, record_call) for layer in self.layers]
        with install_hooks([*hooks, *self._router_hooks([record] * len(self.routers))]):
            output = self.model(**tokens.after(), past_key_values=cache, use_cache=True)
        device = output.logits.device
        return PausedPrompts(
            own_routing=torch.stack([part.to(device) for part in own], dim=1),
            logits=output.logits,
            targets=tokens.targets.to(device),
            hidden=calls[0][0][0].clone(),
            calls=[(args[1:], kwargs) for args, kwargs in calls],
            passed_cache=cache,
            earlier_cache=earlier,
        )

    def resume(self, paused: PausedPrompts, routing: Tensor) -> Tensor:
        """Return the logits after each of the S tokens, the first of them routed by `routing`.

        Gradients reach `routing` if they are enabled. Shapes: routing [B, L, N]. Result [B, S, V].
        """
        cache = _copy_cache(paused.earlier_cache)

        def with_copy(value: Any) -> Any:
            return cache if value is paused.passed_cache else value

        x = paused.hidden
        callbacks = [_replace_first(routing[:, place]) for place in range(routing.shape[1])]
        with install_hooks(self._router_hooks(callbacks)):
            for layer, (args, kwargs) in zip(self.layers, paused.calls, strict=True):
                named = {name: with_copy(value) for name, value in kwargs.items()}
                output = layer(x, *map(with_copy, args), **named)
                x = output[0] if isinstance(output, tuple) else output
        head: Any = unwrap(self.model).get_output_embeddings()
        norm: Any = self.stack.norm
        logits: Tensor = head(norm(x))
        return logits

    def answer_losses(self, paused: PausedPrompts, routing: Tensor) -> Tensor:
        """Return the mean loss of each answer's tokens. Shapes: routing [B, L, N]. Result [B]."""
        losses = target_losses(self.resume(paused, routing), paused.targets)
        return losses.sum(dim=1) / (paused.targets != IGNORED).sum(dim=1)

    def _router_hooks(self, callbacks: Sequence[Callback]) -> list[Installable]:
        pairs = zip(self.routers, callbacks, strict=True)
        if self.gradient == "dense" and torch.is_grad_enabled():
            return [DenseGradientHook(self.model, router, callback) for router, callback in pairs]
        return [RouterHook(router, callback) for router, callback in pairs]

    @contextmanager
    def replace_routing(self, prompts: Sequence[Sequence[int]], routing: Tensor) -> Iterator[None]:
        """Route the last token of each prompt by `routing` until the context is left.

        This applies wherever the model reads one of these prompts from its beginning; all other
        tokens are routed by the routers. Shapes: routing [B, L, N].

        Raises:
            RouterNotCalledError: No end of a prompt went through the routers.
        """
        ends = _PromptEnds([list(prompt) for prompt in prompts])
        callbacks = [ends.replace(routing[:, place]) for place in range(routing.shape[1])]
        with install_hooks([_PreHook(self.stack, ends.find), *self._router_hooks(callbacks)]):
            yield
        if not ends.replaced:
            raise RouterNotCalledError(
                f"Router {self.routers[-1].name!r} never saw the end of a prompt, so its routing "
                f"was not replaced. Use a model that is not compiled, quantised or fused."
            )


def find_last_layers(model: nn.Module, count: int, gradient: str = "sparse") -> LastLayers:
    """Return the last `count` MoE layers, or all there are, and the dense ones between them.

    Raises:
        UnsupportedModelError: The layers cannot be run by themselves.
    """
    routers = find_routers(model)[-count:]
    names = routers[0].name.split(".")
    for end in range(1, len(names)):
        part = model.get_submodule(".".join(names[:end]))
        if isinstance(part, nn.ModuleList):
            stack = model.get_submodule(".".join(names[: end - 1]))
            last = LastLayers(model, routers, stack, list(part)[int(names[end]) :], gradient)
            _check(last)
            return last
    raise _unsupported(model)


def _check(last: LastLayers) -> None:
    """Check that only a norm and the head follow the layers, and that gradients pass.

    Some recurrent layers overwrite what their backward pass needs.
    """
    if not isinstance(getattr(last.stack, "norm", None), nn.Module):
        raise _unsupported(last.model)
    with torch.inference_mode(False), torch.enable_grad():
        paused = last.read([_TRIAL])
        leaf = paused.own_routing.clone().requires_grad_()
        found, wanted = last.resume(paused, leaf).float(), paused.logits.float()
        if found.shape != wanted.shape or (found - wanted).abs().max() > 0.01 * wanted.abs().max():
            raise _unsupported(last.model)
        try:
            torch.autograd.grad(found.sum(), leaf)
        except RuntimeError:
            raise _unsupported(last.model) from None


def _unsupported(model: nn.Module) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The last layers of {type(unwrap(model)).__name__} cannot be run by themselves, as C3PO "
        f"requires. Choose another method for this model."
    )


def _copy_cache(cache: Any) -> Any:
    """Return a copy that can be written on without changing the original."""
    if getattr(cache, "layers", None) is None:
        return copy.deepcopy(cache)
    copied = copy.copy(cache)
    copied.layers = [
        copy.copy(layer) if type(layer) in _REPLACING else copy.deepcopy(layer)
        for layer in cache.layers
    ]
    return copied


def _replace_first(routing: Tensor) -> Callback:
    """Replace the logits of each row's first token. Shapes: routing [B, N], logits [B·S, N]."""

    def replace(inputs: Tensor, logits: Tensor) -> Tensor:
        rows = logits.view(len(routing), -1, logits.shape[-1])
        first = routing.to(logits.device, logits.dtype)[:, None]
        return torch.cat([first, rows[:, 1:]], dim=1).flatten(0, 1)

    return replace


@dataclass(frozen=True)
class _PaddedTokens:
    """Prompts padded on the left, followed by answers padded on the right.

    Shapes: ids, mask, positions [B, P + S]; targets [B, S].
    """

    ids: Tensor
    mask: Tensor
    positions: Tensor
    targets: Tensor

    @classmethod
    def pad(
        cls, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], device: Any
    ) -> _PaddedTokens:
        # At least one token before the last, even if padding, so that there is a cache.
        before = max(2, *map(len, prompts))
        after = max(1, *map(len, answers))
        ids = torch.zeros(len(prompts), before + after - 1, dtype=torch.long)
        mask = torch.ones_like(ids)
        targets = torch.full((len(prompts), after), IGNORED)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            start = before - len(prompt)
            whole = [*prompt, *answer[:-1]]
            ids[row, start : start + len(whole)] = torch.tensor(whole)
            mask[row, :start] = 0
            targets[row, : len(answer)] = torch.tensor(answer, dtype=torch.long)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        return cls(*(part.to(device) for part in (ids, mask, positions, targets)))

    def before(self) -> dict[str, Tensor]:
        """Return a model's arguments for all but the last S tokens."""
        end = -self.targets.shape[1]
        parts = self.ids[:, :end], self.mask[:, :end], self.positions[:, :end]
        return dict(zip(("input_ids", "attention_mask", "position_ids"), parts, strict=True))

    def after(self) -> dict[str, Tensor]:
        """Return a model's arguments for the last S tokens, with a cache of those before."""
        start = -self.targets.shape[1]
        parts = self.ids[:, start:], self.mask, self.positions[:, start:]
        return dict(zip(("input_ids", "attention_mask", "position_ids"), parts, strict=True))


class _PromptEnds:
    """Finds the last tokens of prompts among the flattened tokens that routers see."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self.prompts = prompts
        self.longest = max(map(len, prompts))
        self.replaced = False
        self._found: tuple[list[int], list[int]] | None = None

    def find(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        cache = kwargs.get("past_key_values")
        continued = cache is not None and int(cache.get_seq_length()) > 0
        self._found = None if continued or ids is None else self._places(ids)

    def _places(self, ids: Tensor) -> tuple[list[int], list[int]] | None:
        """Return the places of the last tokens and the numbers of their prompts."""
        count, length = ids.shape
        if (count, length) == (len(self.prompts), self.longest):  # or padded on the left
            return [(row + 1) * length - 1 for row in range(count)], list(range(count))
        found = [
            (row * length + len(prompt) - 1, number)
            for row, line in enumerate(ids.tolist())
            for number, prompt in enumerate(self.prompts)
            if line[: len(prompt)] == prompt
        ]
        # Of equal prompts either will do; a dictionary keeps one.
        unique = dict(found)
        return (list(unique), list(unique.values())) if unique else None

    def replace(self, routing: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the callback of one router. Shapes: routing [B, N]."""

        def callback(inputs: Tensor, logits: Tensor) -> Tensor:
            if self._found is None:
                return logits
            places, owners = (torch.tensor(part, device=logits.device) for part in self._found)
            self.replaced = True
            return logits.index_copy(0, places, routing.to(logits)[owners])

        return callback
