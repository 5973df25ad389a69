"""The language-model head of a memory: its cases also know which token came next.

A memory of router inputs contains a kNN-LM. The inputs of the last layer it is attached to are
looked up once more, with a larger K, and the tokens that followed the cases found are mixed into
the model's next-token probabilities (equations/next_token.py). That takes one more search, and no
more than the tokens which a memory has anyway. A loss that the model computes from labels stays
that of its own logits.

Knows hooks and logits; how cases are found is recall/'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from knn_moe.config import HeadConfig, RoutingConfig
from knn_moe.equations.next_token import mix_next_token
from knn_moe.errors import ConfigError, UnsupportedModelError
from knn_moe.inference.hooks import RecallHook
from knn_moe.memory.memory import RoutingMemory
from knn_moe.recall.layer import layer_gamma
from knn_moe.routers.model_state import unwrap

_NUMBERS: Final = 1 << 26  # that a search or a mixture holds at a time


class Head(nn.Module):
    """The head on a layer's hook, for the rows that use the memory.

    A module only so that its tensors are buffers, which compilers treat as static. Shapes:
    following [M] int64, the token after each case, -1 where there is none.
    """

    following: Tensor

    def __init__(
        self, hook: RecallHook, following: Tensor, gamma: float, config: HeadConfig
    ) -> None:
        super().__init__()
        self.hook = hook
        self.config = config
        self.k = min(config.k, hook.recall.cases)
        self.ran = False
        self.temperature = 1 / (gamma * config.gamma_scale)
        self.register_buffer("following", following.to(hook.recall.gamma.device), persistent=False)
        hook.keeps_inputs = True

    def on_output(self, output: Any, kept: Any) -> None:
        """Mix next tokens into the logits of `output`. `kept` is transformers' `logits_to_keep`."""
        self.ran = True
        if self.hook.selection.empty:
            return
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise UnsupportedModelError(
                f"The model returned {type(output).__name__} without logits, which the memory's "
                f"head needs. Call it with return_dict=True, or leave out head=."
            )
        inputs = self._inputs(logits, kept)
        mixed = self.mix(inputs.flatten(0, 1), logits.flatten(0, 1)).view(logits.shape)
        count = logits.shape[:2].numel()
        selected = self.hook.selection.tokens(count, len(logits), logits.device)
        if selected is not None:
            mixed = torch.where(selected.view(*logits.shape[:2], 1), mixed, logits.to(mixed.dtype))
        output.logits = mixed

    def mix(self, inputs: Tensor, logits: Tensor) -> Tensor:
        """Return log-probabilities. Shapes: inputs [T, d]; logits [T, V] → [T, V] fp32."""
        at_once = max(1, _NUMBERS // max(logits.shape[-1], self.k * inputs.shape[-1]))
        if len(logits) <= at_once:
            return self._mix(inputs, logits)
        parts = zip(inputs.split(at_once), logits.split(at_once), strict=True)
        return torch.cat([self._mix(*part) for part in parts])

    def _mix(self, inputs: Tensor, logits: Tensor) -> Tensor:
        recall = self.hook.recall
        with torch.no_grad():
            distance, rows = recall.nearest_of(inputs.to(recall.gamma.device), self.k)
        tokens = self.following[rows]
        distance = distance.masked_fill(tokens < 0, float("inf")).to(logits.device)
        tokens = tokens.clamp(min=0).to(logits.device)
        return mix_next_token(logits, distance, tokens, self.config.weight, self.temperature)

    def _inputs(self, logits: Tensor, kept: Any) -> Tensor:
        """Return the router inputs of the tokens that have logits. Result [B, T, d]."""
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


def make_head(
    hooks: Sequence[RecallHook], memory: RoutingMemory, config: RoutingConfig
) -> list[Head]:
    """Make the head of the last attached layer; an empty list if the config has none.

    Raises:
        ConfigError: No layer is attached that a head could recall from.
    """
    if config.head is None or config.head.weight == 0 or not len(memory):
        return []
    if not hooks:
        raise ConfigError(
            "A head recalls cases of the last attached layer, and every confidence_factor is 0. "
            "Raise one, or leave out head=."
        )
    hook = max(hooks, key=lambda each: each.router.layer)
    gamma = layer_gamma(memory, hook.router.layer, config, hook.router.device)
    return [Head(hook, memory.provenance.following, gamma, config.head)]


def install_heads(model: nn.Module, heads: Sequence[Head]) -> list[RemovableHandle]:
    """Run the heads, one after the other, when the model has run."""
    if not heads:
        return []

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        for head in heads:
            head.hook.take_inputs()  # left by a run that did not come to its end, or not this way

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        for head in heads:
            head.on_output(output, kwargs.get("logits_to_keep", 0))
        return output

    whole = unwrap(model)
    return [
        whole.register_forward_pre_hook(before),
        whole.register_forward_hook(after, with_kwargs=True),
    ]
