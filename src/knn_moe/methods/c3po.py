"""C3PO (Li, Li and Zhou, 2025): change each question's pathway towards that of solved neighbours.

The pathway ω of a question are the routing logits of its prompt's last token in the last five MoE
layers. In each layer the entries of the top-20 experts are free; the others stay. The reference set
is cut down to the questions that the model answers correctly. With Gaussian weights
K_i = K(x_i, x) of the neighbours, there are three ways to choose ω:

- neighbourhood gradient descent: ω ← ω - lr ∇ Σ K_i ℓ(f(x_i, ω), y_i) / ΣK, where the neighbours
  are run with the test question's ω;
- kernel regression: ω ← αω + (1-α) ΣK_i ω_i / ΣK, with the α of lowest loss on the neighbours;
- mode finding: the same, step by step, with neighbours and weights in the space of ω.

Where the public descriptions leave a choice: ω are logits, which the model's own π takes, not
weights after a softmax; ω_i are the logits with which a neighbour was answered; ℓ is the loss of
the answer's first token by likelihood, and of its first 16 where the answer is generated, since
generated answers begin with the same words; the width of K is the neighbours' mean distance;
neighbours that are too similar are dropped before the three nearest are taken; α is fixed in mode
finding. How the end of a prompt is run again is in pathways.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from knn_moe.errors import ConfigError
from knn_moe.methods.c3po_reference import C3poConfig, SolvedReference, solve_reference
from knn_moe.methods.method import Method
from knn_moe.methods.pathways import LastLayers, find_last_layers
from knn_moe.methods.task_context import TaskContext
from knn_moe.routers.model_state import freeze, input_device
from knn_moe.tasks.answers import Answer
from knn_moe.tasks.questions import Question
from knn_moe.tasks.sample import Sample

# Questions whose ω are sought at a time, by device: a GPU is as fast for many.
_TOGETHER: Final = {"cuda": 128}
_FEW: Final = 16  # on other devices


@dataclass(frozen=True)
class Pathways:
    """The pathways of B test questions, and their similarity to M reference questions.

    Shapes: own [B, L, N], the ω of the model alone; free [B, L, N] bool, the entries that may
    change; cosine [B, M], -inf where a reference question is too similar.
    """

    own: Tensor
    free: Tensor
    cosine: Tensor

    def restrict(self, routing: Tensor) -> Tensor:
        """Return `routing` in the free entries, and the model's own ω elsewhere."""
        return torch.where(self.free, routing, self.own)


@dataclass(frozen=True)
class NeighbourPairs:
    """R pairs of a test question and one of its neighbours.

    Shapes: owners [R], the test questions; places [R], the neighbours; weights [R], K_i / ΣK.
    """

    owners: Tensor
    places: Tensor
    weights: Tensor

    @classmethod
    def nearest(cls, squared: Tensor, config: C3poConfig, device: torch.device) -> NeighbourPairs:
        """Take the nearest, with Gaussian weights.

        Shapes: squared [B, M], squared distances, infinite where there is no neighbour.
        """
        near, places = squared.topk(min(config.neighbours, squared.shape[1]), largest=False)
        there = near.isfinite()
        near = near.masked_fill(~there, 0.0)
        width = near.sum(dim=1, keepdim=True) / there.sum(dim=1, keepdim=True).clamp(min=1)
        if config.bandwidth is not None:
            width = torch.full_like(width, config.bandwidth**2)
        exponent = (-near / (2 * width).clamp(min=1e-12)).masked_fill(~there, -torch.inf)
        weights = exponent.softmax(dim=1)
        owners = torch.arange(len(near), device=near.device)[:, None].expand_as(near)
        parts = owners[there], places[there], weights[there]
        return cls(*(part.to(device) for part in parts))

    def mean(self, values: Tensor, default: Tensor) -> Tensor:
        """Return Σ K_i v_i / ΣK over each question's neighbours, or `default` if it has none.

        Shapes: values [R, …]; default [B, …]. Result [B, …].
        """
        weights = self.weights.view(-1, *[1] * (values.ndim - 1))
        total = torch.zeros_like(default).index_add(0, self.owners, values * weights)
        has = torch.bincount(self.owners, minlength=len(default)) > 0
        return torch.where(has.view(-1, *[1] * (values.ndim - 1)), total, default)


@dataclass(frozen=True)
class C3po(Method):
    """Neighbourhood gradient descent, the best of the three ways."""

    reference: SolvedReference
    config: C3poConfig = field(default_factory=C3poConfig)
    name: str = "c3po"

    def __post_init__(self) -> None:
        for name in ("critical_layers", "answer_tokens", "embedding"):
            ours, theirs = getattr(self.config, name), getattr(self.reference.config, name)
            if ours != theirs:
                raise ConfigError(
                    f"The reference was prepared with {name}={theirs!r}, but C3PO has "
                    f"{name}={ours!r}. Prepare it with the same value."
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
        layers = find_last_layers(model, self.config.critical_layers, self.config.gradient)
        most = _TOGETHER.get(input_device(model).type, _FEW)
        chunk_of = {item.id: chunk for chunk in _chunks(batches, most) for item in chunk}
        found: dict[str, Tensor] = {}

        def answer_with_pathways(batch: Sequence[Question], number: int) -> list[Sample]:
            if batch[0].id not in found:
                chunk = chunk_of[batch[0].id]
                found.clear()
                for start in range(0, len(chunk), most):
                    part = chunk[start : start + most]
                    chosen = self.choose_pathways(layers, part)
                    found.update(zip((item.id for item in part), chosen, strict=True))
            routing = torch.stack([found[item.id] for item in batch])
            with layers.replace_routing([item.ids for item in batch], routing):
                return answer(batch, number)

        return answer_with_pathways

    def choose_pathways(self, layers: LastLayers, batch: Sequence[Question]) -> Tensor:
        """Return ω of each question [B, L, N] fp32."""
        reference = self.reference
        with torch.inference_mode(False), freeze(layers.model):
            own = layers.read([question.ids for question in batch]).own_routing
            keys = reference.embed([reference.kind.question(item.row) for item in batch])
            cosine = keys @ reference.keys.T
            cosine.masked_fill_(cosine > self.config.too_similar, -torch.inf)
            pathways = Pathways(own, core_experts(own, self.config.core_experts), cosine)
            return self.optimise(layers, pathways)

    def find_neighbours(self, pathways: Pathways) -> NeighbourPairs:
        """Find the questions of similar text: for unit vectors, ‖a - b‖² = 2 - 2 cos."""
        return NeighbourPairs.nearest(2 - 2 * pathways.cosine, self.config, pathways.own.device)

    def optimise(self, layers: LastLayers, pathways: Pathways) -> Tensor:
        """Return ω [B, L, N] after gradient descent on the neighbours' loss."""
        pairs, routing = self.find_neighbours(pathways), pathways.own
        if not len(pairs.places):
            return routing
        paused = self.reference.read(layers, pairs.places.tolist())
        for step in range(self.config.steps):
            with torch.enable_grad():
                leaf = routing.detach().requires_grad_()
                losses = layers.answer_losses(paused, leaf[pairs.owners])
                (gradient,) = torch.autograd.grad((losses * pairs.weights).sum(), leaf)
            routing = pathways.restrict(leaf.detach() - self.config.rate(step) * gradient)
        return routing


@dataclass(frozen=True)
class KernelRegression(C3po):
    """Move ω towards the weighted mean of the neighbours' own."""

    name: str = "c3po-kernel"

    @torch.no_grad()
    def optimise(self, layers: LastLayers, pathways: Pathways) -> Tensor:
        pairs, own = self.find_neighbours(pathways), pathways.own
        if not len(pairs.places):
            return own
        paused = self.reference.read(layers, pairs.places.tolist())
        mean = pairs.mean(self.reference.routing.to(own)[pairs.places], default=own)
        tried = [pathways.restrict(torch.lerp(mean, own, alpha)) for alpha in self.config.alphas]
        zero = torch.zeros(len(own), device=own.device)
        losses = [
            pairs.mean(layers.answer_losses(paused, routing[pairs.owners]), zero)
            for routing in tried
        ]
        best = torch.stack(losses).argmin(dim=0)
        return torch.stack(tried)[best, torch.arange(len(own), device=own.device)]


@dataclass(frozen=True)
class ModeFinding(C3po):
    """Move ω to where pathways of correct answers are densest (mean shift), without labels."""

    name: str = "c3po-mode"

    @torch.no_grad()
    def optimise(self, layers: LastLayers, pathways: Pathways) -> Tensor:
        routing = pathways.own
        others = self.reference.routing.to(routing)
        excluded = pathways.cosine.isneginf().to(routing.device)
        for _ in range(self.config.steps):
            rows = zip(routing, pathways.free, strict=True)
            squared = torch.stack(
                [((others - row) * free).square().sum(dim=(1, 2)) for row, free in rows]
            ).masked_fill(excluded, torch.inf)
            pairs = NeighbourPairs.nearest(squared, self.config, routing.device)
            mean = pairs.mean(others[pairs.places], default=routing)
            routing = pathways.restrict(torch.lerp(mean, routing, self.config.mode_alpha))
        return routing


def _chunks(batches: Sequence[Sequence[Question]], most: int) -> list[list[Question]]:
    """Group whole batches, some of one question only: a step for many questions is as fast."""
    chunks: list[list[Question]] = []
    for batch in batches:
        if not chunks or len(chunks[-1]) + len(batch) > most:
            chunks.append([])
        chunks[-1] += batch
    return chunks


def core_experts(routing: Tensor, count: int) -> Tensor:
    """Mark the `count` experts with the highest logits in each layer.

    Shapes: routing [B, L, N]. Result [B, L, N] bool.
    """
    places = routing.topk(min(count, routing.shape[-1])).indices
    return torch.zeros_like(routing, dtype=torch.bool).scatter(-1, places, True)


def prepare_ngd(context: TaskContext) -> C3po:
    """Prepare neighbourhood gradient descent."""
    return C3po(_shared_reference(context))


def prepare_kernel_regression(context: TaskContext) -> KernelRegression:
    """Prepare kernel regression."""
    return KernelRegression(_shared_reference(context))


def prepare_mode_finding(context: TaskContext) -> ModeFinding:
    """Prepare mode finding."""
    return ModeFinding(_shared_reference(context))


def check_model(model: nn.Module) -> None:
    """Refuse a model whose last layers cannot be run by themselves.

    Raises:
        UnsupportedModelError: They cannot.
    """
    with torch.inference_mode(False), freeze(model):
        find_last_layers(model, C3poConfig().critical_layers)


def _shared_reference(context: TaskContext) -> SolvedReference:
    return context.cached("c3po-reference", lambda: solve_reference(context, C3poConfig()))
