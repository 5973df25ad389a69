"""The last hidden states of a model: the inputs of its output embedding, by which kNN-LM looks up.

Knows hooks and batches; nothing of what the states are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from knn_moe.errors import MemoryMismatchError, UnsupportedModelError
from knn_moe.memory.head_keys import HeadKeys
from knn_moe.memory.memory import RoutingMemory
from knn_moe.reference.windows import Batch, ReferenceTokens
from knn_moe.routers.intercept import KeepsInputs
from knn_moe.routers.model_state import (
    freeze,
    input_device,
    install_hooks,
    run_device,
    uncompiled,
    unwrap,
)


class HiddenStateHook(KeepsInputs):
    """Keeps the input of the model's output embedding in its latest forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._output = _output_embedding(model)
        self.closed = False  # whether the hook is about to be removed

    @property
    def device(self) -> torch.device:
        """Where the output embedding runs."""
        return run_device(self._output)

    def install(self) -> list[RemovableHandle]:
        """Put the hook on the output embedding."""
        return [self._output.register_forward_pre_hook(self.keep)]

    def keep(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Keep what the output embedding reads."""
        self.keep_inputs(args[0])

    def take(self, tokens: torch.Size) -> Tensor:
        """Return the hidden states [B, T, d] of logits whose first sizes are `tokens`, [B, T]."""
        recorded = self.take_inputs()
        if recorded is None or recorded.shape[:-1] != tokens:
            shown = "nothing" if recorded is None else list(recorded.shape)
            raise UnsupportedModelError(
                f"The model returned logits of {list(tokens)} tokens, but its output embedding "
                f"read {shown}. A fused head may bypass it: load the model without it."
            )
        return recorded


def check_tokens(model: nn.Module, memory: RoutingMemory) -> None:
    """Raise MemoryMismatchError if a memory holds tokens that the model's vocabulary lacks."""
    find = getattr(unwrap(model), "get_input_embeddings", None)
    stream = memory.provenance.stream
    if find is None or not len(stream):  # not of transformers: nothing says how many there are
        return
    words = len(find().weight)
    if int(stream.max()) >= words:
        raise MemoryMismatchError(
            f"The memory holds token {int(stream.max())}, and the model's vocabulary has {words:,} "
            f"tokens. It belongs to another model."
        )


def check_width(model: nn.Module, head: HeadKeys) -> None:
    """Raise MemoryMismatchError if a head's keys are not as wide as the model's hidden states."""
    output = _output_embedding(model)
    width = getattr(output, "in_features", head.width)
    if head.width != width:
        raise MemoryMismatchError(
            f"The keys of the memory's head have {head.width} dimensions, and the model's hidden "
            f"states {width}. It belongs to another model."
        )


def has_hidden_state_hook(model: nn.Module) -> bool:
    """Whether a head of this library is on the model's output embedding."""
    output = unwrap(model).get_output_embeddings()
    hooks = () if output is None else output._forward_pre_hooks.values()
    owners = [getattr(hook, "__self__", None) for hook in hooks]
    return any(isinstance(owner, HiddenStateHook) and not owner.closed for owner in owners)


def _output_embedding(model: nn.Module) -> nn.Module:
    output: nn.Module | None = unwrap(model).get_output_embeddings()
    if output is None:
        raise UnsupportedModelError(
            f"{type(unwrap(model)).__name__} has no output embedding, whose input a kNN-LM reads. "
            f"Define get_output_embeddings() on the model."
        )
    return output


class BatchStates(NamedTuple):
    """One batch, its logits [B, T, V], and the hidden states of its kept tokens [n, d] with their
    rows [n] int64."""

    batch: Batch
    logits: Tensor
    states: Tensor
    rows: Tensor


@torch.no_grad()
def iter_hidden_states(
    model: nn.Module,
    reference: ReferenceTokens,
    batch_tokens: int,
    before: Callable[[Batch], None] = lambda batch: None,
) -> Iterator[BatchStates]:
    """Read a reference set batch by batch, calling `before` on each of them."""
    model = uncompiled(model)
    hidden, device = HiddenStateHook(model), input_device(model)
    with freeze(model), install_hooks([hidden]):
        for cut in reference.batches(batch_tokens):
            before(cut)
            batch = cut.to(device)
            mask = batch.attention_mask
            output: Any = model(input_ids=batch.ids, attention_mask=mask, use_cache=False)
            logits: Tensor = output.logits
            states = hidden.take(logits.shape[:2])
            spans = [torch.arange(span.row, span.row + span.rows) for span in batch.spans]
            rows = torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)
            yield BatchStates(batch, logits, states[batch.kept.to(states.device)], rows)


def read_hidden_states(
    model: nn.Module,
    reference: ReferenceTokens,
    batch_tokens: int,
    before: Callable[[Batch], None] = lambda batch: None,
) -> Tensor:
    """Return the last hidden state of each kept token, in the order of their rows.

    Shape [M, d], in the model's dtype on the device of its output embedding.
    """
    keys = torch.empty(0)
    for read in iter_hidden_states(model, reference, batch_tokens, before):
        if not len(keys):
            keys = read.states.new_empty(int(reference.kept.sum()), read.states.shape[-1])
        keys[read.rows.to(keys.device)] = read.states
    return keys
