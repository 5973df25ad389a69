"""Distilled memories at one router that are recalled together, each by its own rows: by kernels in
one launch, or in plain torch.

A row uses one memory at most, so nothing is mixed twice. Where one memory serves all rows, where a
call is observed or not counted, and where gradients flow, the hooks mix one after the other.
Knows hooks and slots; what is computed is recall/'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from knn_moe.inference.forward_pass import ForwardPass
from knn_moe.inference.hooks import RecallHook, Step
from knn_moe.inference.rows import RowSlots
from knn_moe.recall.distilled import DistilledRecall
from knn_moe.recall.fused_prototypes import FusedPrototypes
from knn_moe.recall.prototype_tensors import stack_prototypes
from knn_moe.recall.stacked_prototypes import StackedPrototypes


class RecalledTogether(nn.Module):
    """Several distilled memories at one router, in slots.

    A module only so that its tensors are buffers, which compilers treat as static. The memories'
    own recalls and counts become parts of its tensors.

    Args:
        hooks: Their hooks, by slot; see `can_be_together`.
        forward_pass: The pass of these hooks.
        number: Of its slots among those of the choice: see Chosen.
    """

    counts: Tensor

    def __init__(self, hooks: Sequence[RecallHook], forward_pass: ForwardPass, number: int) -> None:
        super().__init__()
        self.hooks = hooks
        self.number = number
        self.forward_pass = forward_pass
        self.spares_first = hooks[0].spares_first
        recalls = [_distilled(hook) for hook in hooks]
        stacked = stack_prototypes([each.tensors() for each in recalls])
        tops = [each.fused.top for each in recalls if each.fused is not None]
        self.fused = FusedPrototypes(stacked, max(tops)) if tops else None
        self.plain = None if tops else StackedPrototypes(stacked)
        counts = torch.stack([hook.counts.sums for hook in hooks])
        self.register_buffer("counts", counts, persistent=False)
        for slot, (hook, recall) in enumerate(zip(hooks, recalls, strict=True)):
            hook.counts.sums = self.counts[slot]
            recall.share(stacked.of_memory(slot))

    def mix(
        self, inputs: Tensor, logits: Tensor, steps: list[tuple[RecallHook, Step]]
    ) -> Tensor | None:
        """See Together."""
        now = self.forward_pass.now
        rows = self.forward_pass.slots(self.number)
        if rows is None or not rows.mixed or now.observer is not None or now.aside:
            return None
        if (inputs.requires_grad or logits.requires_grad) and torch.is_grad_enabled():
            return None
        if self.plain is not None and torch.compiler.is_compiling():
            return None  # how many tokens each memory has is not known there
        slots = self._slots(rows, len(inputs), inputs.device)
        real = self.forward_pass.real(len(inputs), inputs.device)
        if self.plain is not None:
            mixed, confidence = self.plain.forward(inputs, logits, slots)
        else:
            assert self.fused is not None
            mixed, confidence = self.fused.forward(
                inputs, logits, self.counts, real, slots, rows.calls
            )
        for slot in rows.used:
            hook = self.hooks[slot]
            if self.plain is not None and hook.count_changes:
                step = Step(
                    inputs, logits, mixed, confidence, real, False, slots, slot, len(self.hooks)
                )
            else:
                selected = None  # only read where kernels do not count changes
                if not hook.recall.counts_changes:
                    selected = slots == slot if real is None else (slots == slot) & real
                counted = self.plain is None
                step = Step(inputs, logits, mixed, confidence, selected, counted)
            steps.append((hook, step))
        return mixed

    def _slots(self, rows: RowSlots, count: int, device: torch.device) -> Tensor:
        """Return the slot of each token. Result [count] int32."""
        slots = rows.tokens(count, self.forward_pass.now.batch)
        first = self.forward_pass.begins(count, device) if self.spares_first else None
        return slots if first is None else slots.masked_fill(first, -1)


def can_be_together(hooks: Sequence[RecallHook]) -> bool:
    """Return whether the memories of these hooks at one router can be recalled together."""
    if len(hooks) < 2 or not all(isinstance(hook.recall, DistilledRecall) for hook in hooks):
        return False
    recalls = [_distilled(hook) for hook in hooks]
    ways = {
        (each.dtype, each.fused is None, hook.spares_first)
        for each, hook in zip(recalls, hooks, strict=True)
    }
    return len(ways) == 1


def _distilled(hook: RecallHook) -> DistilledRecall:
    assert isinstance(hook.recall, DistilledRecall)
    return hook.recall
