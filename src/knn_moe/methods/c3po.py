"""C3PO (Li, Li and Zhou, 2025): each test sample's pathway, re-mixed by its successful neighbours.

ω, a sample's pathway, are the routing logits of the last token of its prompt in the last five MoE
layers; of each layer the top-20 experts' entries are free, the others stay. The reference set is
cut down to what the model answers correctly. Three ways to choose ω:

- neighbourhood gradient descent: ω ← ω - lr ∇ Σ K(x_i, x) ℓ(f(x_i, ω), y_i) / ΣK, where the
  neighbours are run under the test sample's ω;
- kernel regression: ω ← αω + (1-α) ΣK ω_i / ΣK, with the α of least loss on the neighbours;
- mode finding: the same, step by step, with neighbours and kernel in the space of ω.

Where the public descriptions leave a choice: ω are logits, as the model's own π takes them, not
weights after a softmax; ω_i are the logits a neighbour was answered with; ℓ is the loss of the
answer's first token by likelihood, and of its first 16 where the answer is generated, since it
begins with the same words every time; the kernel is as wide as the neighbours are far on average;
too similar neighbours are dropped before the three are taken; α is fixed in mode finding.

Knows questions and pathways; how a prompt's end is run again is pathways.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from knn_moe.errors import ConfigError
from knn_moe.methods.c3po_reference import C3poConfig, Reference, successes
from knn_moe.methods.method import Method
from knn_moe.methods.pathways import Tail, last_layers
from knn_moe.methods.task_context import TaskContext
from knn_moe.routers.model_state import freeze
from knn_moe.tasks.answers import Answer
from knn_moe.tasks.questions import Question
from knn_moe.tasks.sample import Sample

_TOGETHER: Final = 16  # questions whose ω are sought at a time, unless a batch has more


@dataclass(frozen=True)
class Around:
    """B test samples and their neighbourhood. Shapes: own [B, L, N], their ω to begin with; core
    [B, L, N] bool, the entries that are free; likeness [B, M], cosines, -inf of the too similar."""

    own: Tensor
    core: Tensor
    likeness: Tensor

    def freed(self, routing: Tensor) -> Tensor:
        """`routing` where it is free, else ω as it was."""
        return torch.where(self.core, routing, self.own)


@dataclass(frozen=True)
class Pairs:
    """Test samples with each of their neighbours, K/ΣK beside them. Shapes: owners, places, weights
    [R]."""

    owners: Tensor
    places: Tensor
    weights: Tensor

    @classmethod
    def nearest(cls, squared: Tensor, config: C3poConfig, device: torch.device) -> Pairs:
        """Squared distances [B, M], infinite where there is no neighbour: a Gaussian kernel."""
        near, places = squared.topk(min(config.neighbours, squared.shape[1]), largest=False)
        there = near.isfinite()
        near = near.masked_fill(~there, 0.0)
        width = near.sum(dim=1, keepdim=True) / there.sum(dim=1, keepdim=True).clamp(min=1)
        if config.bandwidth is not None:
            width = torch.full_like(width, config.bandwidth**2)
        kernel = (-near / (2 * width).clamp(min=1e-12)).masked_fill(~there, -torch.inf)
        weights = kernel.softmax(dim=1)
        owners = torch.arange(len(near), device=near.device)[:, None].expand_as(near)
        parts = owners[there], places[there], weights[there]
        return cls(*(part.to(device) for part in parts))

    def mean(self, values: Tensor, alone: Tensor) -> Tensor:
        """Σ K_i v_i / ΣK of each sample's neighbours; its row of `alone` where it has none.

        Shapes: values [R, …], alone [B, …] → [B, …].
        """
        weights = self.weights.view(-1, *[1] * (values.ndim - 1))
        total = torch.zeros_like(alone).index_add(0, self.owners, values * weights)
        has = torch.bincount(self.owners, minlength=len(alone)) > 0
        return torch.where(has.view(-1, *[1] * (values.ndim - 1)), total, alone)


@dataclass(frozen=True)
class C3po(Method):
    """Neighbourhood gradient descent, the best of the three."""

    reference: Reference
    config: C3poConfig = field(default_factory=C3poConfig)
    name: str = "c3po"

    def __post_init__(self) -> None:
        for name in ("critical_layers", "answer_tokens", "embedding"):
            ours, theirs = getattr(self.config, name), getattr(self.reference.config, name)
            if ours != theirs:
                raise ConfigError(
                    f"The reference was prepared with {name} {theirs!r}, and C3PO is to use "
                    f"{ours!r}: prepare it anew."
                )

    def facts(self) -> Mapping[str, Any]:
        return {
            "correct": len(self.reference.questions),
            "reference": self.reference.total,
            "embedding": self.reference.embed.name,
            "config": asdict(self.config),
        }

    def make_answer(
        self, model: nn.Module, answer: Answer, batches: Sequence[Sequence[Question]]
    ) -> Answer:
        if not self.reference.questions:  # no neighbour: the model alone
            return answer
        tail = last_layers(model, self.config.critical_layers, self.config.gradient)
        together = {item.id: chunk for chunk in _chunks(batches) for item in chunk}
        found: dict[str, Tensor] = {}

        def remixed(batch: Sequence[Question], number: int) -> list[Sample]:
            if batch[0].id not in found:
                chunk = together[batch[0].id]
                found.clear()
                ids = (item.id for item in chunk)
                found.update(zip(ids, self.pathways(tail, chunk), strict=True))
            routing = torch.stack([found[item.id] for item in batch])
            with tail.remixed([item.ids for item in batch], routing):
                return answer(batch, number)

        return remixed

    def pathways(self, tail: Tail, batch: Sequence[Question]) -> Tensor:
        """ω of each question. Result [B, L, N] fp32."""
        reference = self.reference
        with torch.inference_mode(False), freeze(tail.model):
            own = tail.read([question.ids for question in batch]).own
            keys = reference.embed([reference.kind.question(item.row) for item in batch])
            likeness = keys @ reference.keys.T
            likeness.masked_fill_(likeness > self.config.too_similar, -torch.inf)
            around = Around(own, core_experts(own, self.config.core_experts), likeness)
            return self.remix(tail, around)

    def near(self, around: Around) -> Pairs:
        """Neighbours of the questions' texts: of unit vectors, ‖a - b‖² = 2 - 2 cos."""
        return Pairs.nearest(2 - 2 * around.likeness, self.config, around.own.device)

    def remix(self, tail: Tail, around: Around) -> Tensor:
        """ω by descent on the neighbours' loss."""
        pairs, routing = self.near(around), around.own
        if not len(pairs.places):
            return routing
        halted = self.reference.read(tail, pairs.places.tolist())
        for step in range(self.config.steps):
            with torch.enable_grad():
                leaf = routing.detach().requires_grad_()
                losses = tail.losses(halted, leaf[pairs.owners])
                (slope,) = torch.autograd.grad((losses * pairs.weights).sum(), leaf)
            routing = around.freed(leaf.detach() - self.config.rate(step) * slope)
        return routing


@dataclass(frozen=True)
class KernelRegression(C3po):
    """ω towards the mean of the neighbours' own."""

    name: str = "c3po-kernel"

    @torch.no_grad()
    def remix(self, tail: Tail, around: Around) -> Tensor:
        pairs, own = self.near(around), around.own
        if not len(pairs.places):
            return own
        halted = self.reference.read(tail, pairs.places.tolist())
        mean = pairs.mean(self.reference.routing.to(own)[pairs.places], alone=own)
        tried = [around.freed(torch.lerp(mean, own, alpha)) for alpha in self.config.alphas]
        none = torch.zeros(len(own), device=own.device)
        losses = [pairs.mean(tail.losses(halted, routing[pairs.owners]), none) for routing in tried]
        best = torch.stack(losses).argmin(dim=0)
        return torch.stack(tried)[best, torch.arange(len(own), device=own.device)]


@dataclass(frozen=True)
class ModeFinding(C3po):
    """ω towards where pathways of correct answers lie densest (mean shift). No label is used."""

    name: str = "c3po-mode"

    @torch.no_grad()
    def remix(self, tail: Tail, around: Around) -> Tensor:
        routing = around.own
        others = self.reference.routing.to(routing)
        barred = around.likeness.isneginf().to(routing.device)
        for _ in range(self.config.steps):
            rows = zip(routing, around.core, strict=True)
            squared = torch.stack(
                [((others - row) * core).square().sum(dim=(1, 2)) for row, core in rows]
            ).masked_fill(barred, torch.inf)
            pairs = Pairs.nearest(squared, self.config, routing.device)
            mean = pairs.mean(others[pairs.places], alone=routing)
            routing = around.freed(torch.lerp(mean, routing, self.config.mode_alpha))
        return routing


def _chunks(batches: Sequence[Sequence[Question]]) -> list[list[Question]]:
    """Whole batches, some of one question only, together: a step for many is as quick."""
    chunks: list[list[Question]] = []
    for batch in batches:
        if not chunks or len(chunks[-1]) + len(batch) > _TOGETHER:
            chunks.append([])
        chunks[-1] += batch
    return chunks


def core_experts(routing: Tensor, count: int) -> Tensor:
    """Which experts are free: the `count` a token's own router likes best, layer by layer.

    Shapes: routing [B, L, N] → [B, L, N] bool.
    """
    places = routing.topk(min(count, routing.shape[-1])).indices
    return torch.zeros_like(routing, dtype=torch.bool).scatter(-1, places, True)


def prepare_ngd(context: TaskContext) -> C3po:
    return C3po(shared_reference(context))


def prepare_kernel_regression(context: TaskContext) -> KernelRegression:
    return KernelRegression(shared_reference(context))


def prepare_mode_finding(context: TaskContext) -> ModeFinding:
    return ModeFinding(shared_reference(context))


def shared_reference(context: TaskContext) -> Reference:
    """For all three, made once."""
    return context.cached("c3po-reference", lambda: successes(context, C3poConfig()))
