"""The language-model head of a memory: its cases also know which token came next.

A memory contains a kNN-LM. Each token's key is looked up, with a larger K than for routing, and
the tokens that followed the cases found are mixed into the model's next-token probabilities
(equations/next_token.py). The key is the input of the last router that the memory is attached to,
which takes no more storage than a memory has anyway; or the last hidden state, as kNN-LM has it,
for which a memory holds head keys. A loss that the model computes from labels stays that of its
own logits.

Knows hooks and logits; how cases are found is recall/'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from knn_moe.config import HeadConfig, RoutingConfig
from knn_moe.equations.next_token import mix_next_token
from knn_moe.errors import AttachError, UnsupportedModelError
from knn_moe.inference.forward_pass import ForwardPass
from knn_moe.inference.hidden_states import HiddenStateHook, check_tokens, check_width
from knn_moe.inference.hooks import RecallHook, Selection
from knn_moe.inference.rows import ALL_ROWS, FlatTokens
from knn_moe.memory.memory import RoutingMemory
from knn_moe.recall.layer import LayerRecall, layer_gamma
from knn_moe.recall.next_token import TokenIndex, open_head_keys
from knn_moe.routers.intercept import NotCopied
from knn_moe.routers.model_state import unwrap

_NUMBERS: Final = 1 << 26  # that a search or a mixture holds at a time


class HeadMixture(NamedTuple):
    """How the tokens that followed the nearest cases are mixed in."""

    k: int
    weight: float  # λ of equations/next_token.py
    temperature: float  # τ, of squared distances

    @classmethod
    def of(cls, config: HeadConfig, gamma: float) -> HeadMixture:
        """Return what `config` makes of the keys' γ."""
        return cls(config.k, config.weight, 1 / (gamma * config.gamma_scale))


class Head(nn.Module):
    """Mixes next tokens into a model's logits, for the rows that use the memory.

    A module only so that its tensors are buffers, which compilers treat as static.
    """

    def __init__(self, mixture: HeadMixture, selection: Selection | None) -> None:
        super().__init__()
        self.mixture = mixture
        self.selection = selection  # None: all rows
        self.called = False  # whether the model that it belongs to was called

    @property
    def states(self) -> HiddenStateHook | None:
        """The hook that keeps the keys to look up, if the head has its own."""
        return None

    def is_used(self) -> bool:
        """Whether the model ever ran with a row that uses the memory."""
        return self.selection is None or self.selection.used

    def forget(self) -> None:
        """Forget keys that a run left which did not come to its end, or not this way."""
        raise NotImplementedError

    def take_keys(self, logits: Tensor, kept: Any) -> Tensor:
        """Return the keys of the tokens that have logits.

        `kept` is transformers' `logits_to_keep`. Shapes: logits [B, T, V] → [B, T, d].
        """
        raise NotImplementedError

    def nearest(self, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return squared distances, inf where nothing followed, and the tokens that followed.

        Shapes: keys [T, d] → [T, k] fp32 and int64.
        """
        raise NotImplementedError

    def on_output(self, output: Any, kept: Any) -> None:
        """Mix next tokens into the logits of `output`. `kept` is transformers' `logits_to_keep`."""
        rows = ALL_ROWS if self.selection is None else self.selection.rows()
        if rows.empty:
            return
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise UnsupportedModelError(
                f"The model returned {type(output).__name__} without logits, which a head needs. "
                f"Call it with return_dict=True, or leave out head=."
            )
        keys, own = self.take_keys(logits, kept).flatten(0, 1), logits.flatten(0, 1)
        selected = rows.of_logits(logits, kept)
        if isinstance(rows, FlatTokens) and selected is not None:  # other tokens are not looked up
            places = selected.nonzero().squeeze(1)
            mixed = own.float()
            if len(places):
                mixed = mixed.index_copy(0, places, self.mix(keys[places], own[places]))
        else:
            mixed = self.mix(keys, own)
            if selected is not None:
                mixed = torch.where(selected[:, None], mixed, own.to(mixed.dtype))
        output.logits = mixed.view(logits.shape)

    def mix(self, keys: Tensor, logits: Tensor) -> Tensor:
        """Return log-probabilities. Shapes: keys [T, d]; logits [T, V] → [T, V] fp32."""
        at_once = max(1, _NUMBERS // max(logits.shape[-1], self.mixture.k * keys.shape[-1]))
        if len(logits) <= at_once:
            return self._mix(keys, logits)
        parts = zip(keys.split(at_once), logits.split(at_once), strict=True)
        return torch.cat([self._mix(*part) for part in parts])

    def _mix(self, keys: Tensor, logits: Tensor) -> Tensor:
        k, weight, temperature = self.mixture
        with torch.no_grad():
            found = self.nearest(keys, k)
        distance, tokens = (part.to(logits.device) for part in found)
        return mix_next_token(logits, distance, tokens, weight, temperature)


class RouterHead(Head):
    """Looks up what a router read, in the cases of its layer.

    Shapes: following [M] int64, the token after each case, -1 where there is none.
    """

    following: Tensor

    def __init__(self, hook: RecallHook, following: Tensor, mixture: HeadMixture) -> None:
        super().__init__(mixture, hook.selection)
        assert isinstance(hook.recall, LayerRecall)  # check_use refuses a distilled memory's head
        self.hook, self.recall = hook, hook.recall
        self.register_buffer("following", following.to(hook.recall.gamma.device), persistent=False)
        hook.keeps_inputs = True

    def forget(self) -> None:
        self.hook.take_inputs()

    def nearest(self, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
        distance, rows = self.recall.nearest_of(keys.to(self.following.device), k)
        tokens = self.following[rows]
        return distance.masked_fill(tokens < 0, float("inf")), tokens.clamp(min=0)

    def take_keys(self, logits: Tensor, kept: Any) -> Tensor:
        read = self.hook.take_inputs()
        batch = logits.shape[0]
        if read is not None and logits.ndim == 3 and not len(read) % batch:
            inputs = read.view(batch, -1, read.shape[-1])
            if isinstance(kept, Tensor):
                inputs = inputs[:, kept.to(inputs.device)]
            elif kept:
                inputs = inputs[:, -kept:]
            if inputs.shape[1] == logits.shape[1]:
                return inputs
        shown = "nothing" if read is None else list(read.shape)
        raise UnsupportedModelError(
            f"The model gave logits {list(logits.shape)}, and router {self.hook.router.name!r} "
            f"read {shown}, so they cannot be matched. Leave out head=."
        )


class HiddenHead(Head):
    """Looks up the last hidden state among others: a kNN-LM."""

    def __init__(
        self,
        hook: HiddenStateHook,
        index: TokenIndex,
        mixture: HeadMixture,
        selection: Selection | None = None,
    ) -> None:
        mixture = mixture._replace(k=min(mixture.k, len(index)))
        super().__init__(mixture, selection)
        self.hook = hook
        self.index = index

    @property
    def states(self) -> HiddenStateHook:
        return self.hook

    def forget(self) -> None:
        self.hook.take_inputs()

    def nearest(self, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return self.index.nearest(keys, k)

    def take_keys(self, logits: Tensor, kept: Any) -> Tensor:
        return self.hook.take(logits.shape[:-1])


def make_head(
    model: nn.Module,
    hooks: Sequence[RecallHook],
    memory: RoutingMemory,
    config: RoutingConfig,
    selection: Selection | None = None,
) -> list[Head]:
    """Make the head that `config` names, for the rows of `selection`; an empty list if it has none.

    Raises:
        AttachError: The head keys do not fit on the device of the output embedding.
        MemoryFormatError: The head looks up hidden states, and the memory has none.
        MemoryMismatchError: Tokens or keys do not fit the model.
    """
    head = config.head
    if head is None or head.weight == 0 or not len(memory):
        return []
    check_tokens(model, memory)
    if head.keys == "router":
        last = max(hooks, key=lambda each: each.router.layer)
        gamma = layer_gamma(memory, last.router.layer, config, last.router.device)
        return [RouterHead(last, memory.provenance.following, HeadMixture.of(head, gamma))]
    hook = HiddenStateHook(model)
    if memory.head_keys is not None:
        check_width(model, memory.head_keys)
    try:
        index = open_head_keys(memory, config.index, hook.device)
    except torch.OutOfMemoryError:
        raise AttachError(
            f"The head's keys do not fit on {hook.device} beside the model. Compress the memory "
            f"(knn-moe compress), or leave out head=."
        ) from None
    gamma = memory.head_keys.gamma if memory.head_keys else 1.0
    return [HiddenHead(hook, index, HeadMixture.of(head, gamma), selection)]


class HeadHooks(NotCopied):
    """Runs the heads, one after the other, when the model has run.

    Args:
        model: The model.
        heads: Its heads.
        forward_pass: The pass that the heads' memories are attached to, which ends with them.
    """

    def __init__(
        self, model: nn.Module, heads: Sequence[Head], forward_pass: ForwardPass | None = None
    ) -> None:
        self.heads = heads
        self._whole = unwrap(model)
        self._pass = forward_pass

    def install(self) -> list[RemovableHandle]:
        """Put the hooks on the model and on its output embedding."""
        return [
            *(handle for hook in self.states() for handle in hook.install()),
            self._whole.register_forward_pre_hook(self.before),
            self._whole.register_forward_hook(self.after, with_kwargs=True, always_call=True),
        ]

    def states(self) -> list[HiddenStateHook]:
        """Return the hooks on the output embedding."""
        return [head.states for head in self.heads if head.states is not None]

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Forget what an earlier run has left."""
        if self._pass is not None and not torch.compiler.is_compiling():
            self._pass.now.ends_later = True
        for head in self.heads:
            head.forget()
            head.called = True

    # A hook that another thread is just removing may be called without its last argument.
    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any = None
    ) -> Any:
        """Mix next tokens into the logits. After an exception there are none."""
        active = self._pass is None or (self._pass.active() and self._pass.now.alone is None)
        try:
            if output is not None and active:
                for head in self.heads:
                    head.on_output(output, kwargs.get("logits_to_keep", 0))
        finally:
            if self._pass is not None and not torch.compiler.is_compiling():
                self._pass.now.ends_later = False
                self._pass.end()
        return output if active else None
