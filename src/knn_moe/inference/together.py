"""Distilled memories at one router that are recalled in one launch, each by its own rows.

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
        fused = [_fused(hook) for hook in hooks]
        stacked = stack_prototypes([each.tensors for each in fused])
        self.fused = FusedPrototypes(stacked, max(each.top for each in fused))
        counts = torch.stack([hook.counts.sums for hook in hooks])
        self.register_buffer("counts", counts, persistent=False)
        for slot, hook in enumerate(hooks):
            hook.counts.sums = self.counts[slot]
            assert isinstance(hook.recall, DistilledRecall)
            hook.recall.share(stacked.of_memory(slot))

    def mix(
        self, inputs: Tensor, logits: Tensor, steps: list[tuple[RecallHook, Step]]
    ) -> Tensor | None:
        """See Together."""
        now = self.forward_pass.now
        rows = self.forward_pass.slots(self.number)
        if rows is None or not rows.mixed or now.observer is not None or now.aside:
            return None
        if not self.hooks[0].recall.counts_call(inputs, logits):
            return None
        slots = self._slots(rows, len(inputs), inputs.device)
        real = self.forward_pass.real(len(inputs), inputs.device)
        mixed, confidence = self.fused.forward(inputs, logits, self.counts, real, slots, rows.calls)
        for slot in rows.used:
            hook = self.hooks[slot]
            selected = None  # only read where kernels do not count changes
            if not hook.recall.counts_changes:
                selected = slots == slot if real is None else (slots == slot) & real
            steps.append((hook, Step(inputs, logits, mixed, confidence, selected, counted=True)))
        return mixed

    def _slots(self, rows: RowSlots, count: int, device: torch.device) -> Tensor:
        """Return the slot of each token. Result [count] int32."""
        slots = rows.tokens(count, self.forward_pass.now.batch)
        first = self.forward_pass.begins(count, device) if self.spares_first else None
        return slots if first is None else slots.masked_fill(first, -1)


def can_be_together(hooks: Sequence[RecallHook]) -> bool:
    """Return whether the memories of these hooks at one router can be recalled in one launch."""
    recalls = [hook.recall for hook in hooks]
    ways = {(each.dtype, hook.spares_first) for each, hook in zip(recalls, hooks, strict=True)}
    fused = all(isinstance(each, DistilledRecall) and each.fused is not None for each in recalls)
    return fused and len(hooks) > 1 and len(ways) == 1


def _fused(hook: RecallHook) -> FusedPrototypes:
    recall = hook.recall
    assert isinstance(recall, DistilledRecall)
    assert recall.fused is not None
    return recall.fused
