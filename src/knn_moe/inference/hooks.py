"""The hooks of an attached memory: mix at each router, and count what that changed.

Counts are tensors on the router's device: nothing waits for the device, and a compiled graph
updates them like any buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from knn_moe.inference.forward_pass import ForwardPass
from knn_moe.inference.rows import ALL_ROWS, Rows
from knn_moe.recall.layer import UNITS, Recall, RouterCall
from knn_moe.routers.find import Router
from knn_moe.routers.intercept import (
    KeepsInputs,
    RouterHook,
    Watch,
    chosen_experts,
    run_router,
)


@dataclass(frozen=True)
class LayerStats:
    """What one layer's memory has done since it was attached. Padding and tokens that are left to
    the router do not count."""

    calls: int
    tokens: int
    mean_confidence: float  # mean λ
    changed: float | None  # share of tokens whose experts changed; None: not counted


class Counts(nn.Module):
    """Running sums, as a buffer so that compilers treat it as static.

    Shape: sums [4] int64: calls, tokens, tokens whose experts changed, and the sum of λ in units
    of 2⁻³². Whole numbers, so that kernels can add to them in any order.
    """

    sums: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(4, dtype=torch.int64, device=device), False)
        self._adding = threading.Lock()

    @torch.no_grad()
    def add(self, confidence: Tensor, changed: Tensor | None, real: Tensor | None) -> None:
        """Count one call. Shapes: confidence, changed, real [T]; no `real`: no padding."""
        real = torch.ones_like(confidence, dtype=torch.bool) if real is None else real
        units = torch.where(real, (confidence.double() * UNITS).round().long(), 0).sum()
        none = torch.zeros_like(units)
        changes = none if changed is None else (changed & real).sum()
        self.add_sums(torch.stack([none + 1, real.sum(), changes, units]))

    @torch.no_grad()
    def add_changed(self, changed: Tensor, real: Tensor | None) -> None:
        """Count the changes of a call that is counted otherwise. Shapes: [T]."""
        changes = (changed if real is None else changed & real).sum()
        none = torch.zeros_like(changes)
        self.add_sums(torch.stack([none, none, changes, none]))

    def add_sums(self, counts: Tensor) -> None:
        """Add to all sums. Shapes: counts [4] int64."""
        if torch.compiler.is_compiling():
            self.sums += counts
            return
        with self._adding:
            self.sums += counts


class Selection:
    """Which rows of each pass use one memory: all of them, if it has no name."""

    def __init__(self, now: ForwardPass, name: str | None = None) -> None:
        self.name = name
        self._pass = now

    @property
    def used(self) -> bool:
        """Whether the model ever ran with a row that uses the memory."""
        return self.name is None or self._pass.used[self.name]

    def rows(self) -> Rows:
        """Return the rows of this thread's pass."""
        return ALL_ROWS if self.name is None else self._pass.rows(self.name)


class Step(NamedTuple):
    """What one memory did in one call of a router.

    Shapes: inputs [T, d]; logits, mixed [T, N]; confidence, real [T]; no `real`: no padding.
    """

    inputs: Tensor
    logits: Tensor
    mixed: Tensor
    confidence: Tensor
    real: Tensor | None
    counted: bool  # whether a kernel has counted it, as far as kernels do
    # Where several memories mixed in plain torch: that of each token [T], -1: none; the number of
    # this one; and how many there are.
    slots: Tensor | None = None
    slot: int = 0
    memories: int = 0


@dataclass(eq=False)
class Choice:
    """The experts that a router chose without and with a memory, or several that mixed together.

    Shapes: before, after [T, top_k]; changed [T].
    """

    step: Step
    before: Tensor
    after: Tensor
    changed: Tensor
    _sums: Tensor | None = None

    def sums(self, slot: int) -> Tensor:
        """Return what one of several memories is to count. Result [4]; see Counts."""
        if self._sums is None:
            step, slots = self.step, self.step.slots
            assert slots is not None
            units = (step.confidence.double() * UNITS).round().long()
            ones = torch.ones_like(units)
            rows = torch.stack([torch.zeros_like(units), ones, self.changed.long(), units], dim=1)
            if step.real is not None:
                rows = rows.masked_fill(~step.real[:, None], 0)
            self._sums = rows.new_zeros(step.memories + 1, 4)
            self._sums.index_add_(0, slots + 1, rows)
            self._sums[:, 0] = 1
        return self._sums[slot + 1]

    def of(self, step: Step) -> bool:
        """Return whether it is also that of another step."""
        return step.logits is self.step.logits and step.mixed is self.step.mixed


class RecallHook(KeepsInputs):
    """Mixes what a layer recalls into its router's logits, and counts what that changed."""

    def __init__(
        self,
        router: Router,
        recall: Recall,
        forward_pass: ForwardPass,
        *,
        count_changes: bool,
        selection: Selection | None = None,
        spare_first_token: bool = False,
    ) -> None:
        super().__init__()
        self.router = router
        self.recall = recall
        self.spares_first = spare_first_token
        forward_pass.finds_first |= spare_first_token
        self.selection = selection or Selection(forward_pass)
        self.forward_pass = forward_pass
        self.count_changes = count_changes
        self.counts = Counts(recall.gamma.device)
        self.called = False
        self.keeps_inputs = False  # for a head, which takes them when the model has run

    def mix(self, inputs: Tensor, logits: Tensor) -> Step | None:
        """Mix; None: no row uses the memory. Shapes: inputs [T, d]; logits [T, N]."""
        rows = self.selection.rows()
        if rows.empty:
            return None
        if self.keeps_inputs:
            self.keep_inputs(inputs)
        real = self.forward_pass.real(len(inputs), inputs.device)
        selected = self._select(rows, len(inputs), inputs.device)
        if selected is not None:
            real = selected if real is None else selected & real
        counted = self.recall.counts_call(inputs, logits)
        counts = self.counts.sums if counted and not self.forward_pass.now.aside else None
        places = None if torch.compiler.is_compiling() else rows.places(inputs.device)
        if places is None:
            mixed, confidence = self.recall.forward(inputs, logits, counts, real)
        else:
            mixed, confidence = self._recall_at(places, inputs, logits, counts, real)
        if selected is not None:
            mixed = torch.where(selected[:, None], mixed, logits)
            confidence = confidence.masked_fill(~selected, 0.0)
        return Step(inputs, logits, mixed, confidence, real, counted)

    def _recall_at(
        self,
        places: Tensor,
        inputs: Tensor,
        logits: Tensor,
        counts: Tensor | None,
        real: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return mixed logits and λ of the tokens at `places` [n]; others keep theirs, and λ 0."""
        own = None if real is None else real[places]
        mixed, confidence = self.recall.forward(inputs[places], logits[places], counts, own)
        everywhere = confidence.new_zeros(len(inputs)).index_copy(0, places, confidence)
        return logits.index_copy(0, places, mixed), everywhere

    def _select(self, rows: Rows, count: int, device: torch.device) -> Tensor | None:
        """Tell which tokens use the memory; None: all do. Result [count] bool, on `device`."""
        selected = rows.tokens(count, self.forward_pass.now.batch, device)
        first = self.forward_pass.begins(count, device) if self.spares_first else None
        if first is None:
            return selected
        return ~first if selected is None else selected & ~first

    def count(
        self,
        step: Step,
        module: nn.Module,
        called: tuple[tuple[Any, ...], dict[str, Any]],
        output: Any,
        choices: list[Choice],
    ) -> None:
        """Count what the call changed, from what the router returned. `choices` has what other
        memories found in the same call."""
        observer, aside = self.forward_pass.now.observer, self.forward_pass.now.aside
        changed = found = None
        uncounted = self.count_changes and not (step.counted and self.recall.counts_changes)
        if (uncounted and not aside) or observer is not None:
            found = next((one for one in choices if one.of(step)), None)
            if found is None:
                unmixed = self._unmixed(module, *called, step.logits)
                chosen = chosen_experts(self.router, unmixed, step.logits)
                used = chosen_experts(self.router, output, step.mixed)
                found = Choice(step, chosen, used, (chosen != used).any(dim=-1))
                choices.append(found)
            changed = found.changed
            if observer is not None:
                seen = RouterCall(
                    self.router.layer,
                    self.recall,
                    step.inputs,
                    logits=step.logits,
                    mixed=step.mixed,
                    before=found.before,
                    after=found.after,
                    confidence=step.confidence,
                )
                observer(seen)
        if not torch.compiler.is_compiling():
            self.called = True
        if aside:
            return
        if found is not None and step.slots is not None and self.count_changes:
            self.counts.add_sums(found.sums(step.slot))
        elif not step.counted:
            self.counts.add(step.confidence, changed, step.real)
        elif uncounted and changed is not None:
            self.counts.add_changed(changed, step.real)

    def _unmixed(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], logits: Tensor
    ) -> Any:
        """Return what the router would have returned on its own logits."""
        if module is not self.router.module:
            return None  # the whole block's forward: too much to run twice
        with torch.no_grad():
            return run_router(self.router, lambda inputs, own: logits, args, kwargs)

    def was_called(self) -> bool:
        """Whether the router was called, or no row used the memory."""
        return self.called or not self.selection.used or int(self.counts.sums[0]) > 0

    def stats(self) -> LayerStats:
        """Return the counts so far."""
        calls, tokens, changed, confidence = self.counts.sums.tolist()
        return LayerStats(
            calls=calls,
            tokens=tokens,
            mean_confidence=confidence / UNITS / max(tokens, 1),
            changed=changed / max(tokens, 1) if self.count_changes else None,
        )


class Together(Protocol):
    """Mixes for several hooks at once."""

    def mix(
        self, inputs: Tensor, logits: Tensor, steps: list[tuple[RecallHook, Step]]
    ) -> Tensor | None:
        """Return mixed logits, and add what the hooks are to count to `steps`. None: this call is
        to be mixed by one hook after the other. Shapes: inputs [T, d]; logits [T, N] → [T, N]."""


class RecallWatch(Watch):
    """A call of a router that recalls, and what each memory did in it."""

    def __init__(
        self, router: Router, hooks: Sequence[RecallHook], together: Together | None
    ) -> None:
        self.steps: list[tuple[RecallHook, Step]] = []
        super().__init__(router, partial(_mix, hooks, together, self.steps))


def _mix(
    hooks: Sequence[RecallHook],
    together: Together | None,
    steps: list[tuple[RecallHook, Step]],
    inputs: Tensor,
    logits: Tensor,
) -> Tensor:
    mixed = None if together is None else together.mix(inputs, logits, steps)
    if mixed is not None:
        return mixed
    for hook in hooks:
        step = hook.mix(inputs, logits)
        if step is not None:
            steps.append((hook, step))
            logits = step.mixed
    return logits


def _leave(inputs: Tensor, logits: Tensor) -> Tensor:
    return logits


class HookStack(RouterHook):
    """The hooks of the memories at one router: one after the other, or together. `hooks` may be
    replaced."""

    def __init__(
        self,
        router: Router,
        hooks: Sequence[RecallHook],
        forward_pass: ForwardPass,
        together: Together | None = None,
    ) -> None:
        super().__init__(router, partial(_mix, hooks, together, []))
        self.hooks = hooks
        self.forward_pass = forward_pass
        self.together = together

    @property
    def closed(self) -> bool:
        return self.forward_pass.closed

    def watch(self) -> Watch | None:
        if not self.hooks or not self.forward_pass.active():
            return None
        if self.forward_pass.now.alone is not None:
            return Watch(self.router, _leave)
        return RecallWatch(self.router, self.hooks, self.together)

    def finish(
        self,
        watch: Watch,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        if isinstance(watch, RecallWatch):
            choices: list[Choice] = []
            for hook, step in watch.steps:
                hook.count(step, module, (args, kwargs), output, choices)
        elif (alone := self.forward_pass.now.alone) is not None and watch.logits is not None:
            alone(self.router.layer, chosen_experts(self.router, output, watch.logits))
        return output
