"""Make a memory smaller: keep the cases that other examples gain from most, or any.

Exact repeats go first: of cases that read the same tokens, the best stays. The rest go by their
score (by_loss.py), about half of them at a time: when many are gone, others are recalled in their
place, and are scored again. Or by chance, which favours no example: what is left can still be
calibrated on its own reference set. A case is kept or dropped on all layers at once.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor, nn

from knn_moe.adapt.prune.by_loss import ScoredRecall, score_by_loss
from knn_moe.equations.similarity import SIMILARITIES
from knn_moe.errors import ConfigError, PruningError
from knn_moe.inference.arguments import MemoryLike, open_memory
from knn_moe.inference.attach import check_belongs
from knn_moe.inference.handle import check_free
from knn_moe.memory.files import refuse_existing
from knn_moe.memory.manifest import MemoryManifest, join_scores
from knn_moe.memory.memory import RoutingMemory
from knn_moe.recall.layer import layer_gamma
from knn_moe.recall.leave_one_out import Cases
from knn_moe.reference.provenance import owners
from knn_moe.routers.find import find_routers
from knn_moe.routers.model_state import forget_compiled_graphs, uncompiled
from knn_moe.support.progress import OnProgress, StepCounter, ignore_progress

PruneBy: TypeAlias = Literal["loss", "chance"]


def prune(
    model: nn.Module | None,
    memory: MemoryLike,
    keep: float = 0.1,
    *,
    by: PruneBy = "loss",
    folder: str | Path | None = None,
    overwrite: bool = False,
    force: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> RoutingMemory:
    """Keep a share of the memory's cases.

    Cases are recalled as the memory's own routing does, by exact search. γ, widths and what a
    calibration found are kept.

    Args:
        model: The model that the memory was built for. May be None with by="chance".
        memory: A memory with keys, or the folder or hub id of one.
        keep: The share of cases that stay.
        by: "loss" keeps the cases that take most off the loss of reference tokens of other
            examples. "chance" keeps any: calibrate what is left.
        folder: Where the memory is written and opened. None: a temporary folder that lives as long
            as the memory.
        overwrite: Replace a memory that is in `folder`.
        force: As in `attach`.
        on_progress: Called after each batch.

    Returns:
        The smaller memory.

    Raises:
        AttachError: The model has a memory attached.
        ConfigError: `keep` or `by` is out of range, or the model is missing.
        PruningError: Nothing says which cases to drop.
    """
    memory = open_memory(memory)
    _check(model, memory, keep, by)
    if folder is not None:
        refuse_existing(Path(folder), overwrite=overwrite)
    rows, manifest = torch.arange(len(memory)), memory.manifest
    count = max(1, round(keep * len(memory)))
    if count < len(memory):
        scorer = None
        if by == "loss" and model is not None:
            scorer = _Scorer(model, memory, force, on_progress)
        sizes = [count] if scorer is None else _halving_sizes(len(memory), count)
        for size in sizes:
            left = memory if len(rows) == len(memory) else memory.subset(rows)
            scores = _random_scores(left) if scorer is None else scorer.score(left, size)
            rows = rows[best_rows(scores, left.provenance.prefix_hash(), size)]
        manifest = _pruned_manifest(memory, len(rows), by, len(sizes))
    return memory.subset(rows, manifest=manifest, folder=folder, overwrite=overwrite)


def _check(model: nn.Module | None, memory: RoutingMemory, keep: float, by: str) -> None:
    if not 0 < keep <= 1:
        raise ConfigError(f"keep must be above 0 and at most 1, got {keep}.")
    if by not in get_args(PruneBy):
        raise ConfigError(f"by must be one of {', '.join(get_args(PruneBy))}, got {by!r}.")
    if by == "loss" and model is None:
        raise ConfigError("Pruning by loss needs the model. Give it, or prune by chance.")
    memory.full_layers()
    if memory.manifest.random_seed is not None:
        raise PruningError(
            "This memory is a control that recalls cases at random. Prune the memory it was made "
            "from."
        )


def _halving_sizes(cases: int, count: int) -> list[int]:
    """Return sizes down to `count`, in steps of about a half."""
    rounds = max(1, round(math.log2(cases / count)))
    return [round(cases * (count / cases) ** (step / rounds)) for step in range(1, rounds + 1)]


def best_rows(scores: Tensor, case: Tensor, count: int) -> Tensor:
    """Return the `count` rows of highest score, ascending; repeats of a case come last.

    Shapes: scores [M]; case [M] int64, equal for keys that are one case → [count] int64.
    """
    order = torch.argsort(scores, descending=True, stable=True)
    _, first = np.unique(case[order].numpy(), return_index=True)
    repeat = torch.ones(len(order), dtype=torch.bool)
    repeat[torch.from_numpy(first)] = False
    ranked = torch.cat([order[~repeat], order[repeat]])
    return ranked[:count].sort().values


def _random_scores(memory: RoutingMemory) -> Tensor:
    """Score cases at random, the same every time. Shape [M]."""
    return torch.rand(len(memory), generator=torch.Generator().manual_seed(len(memory)))


class _Scorer:
    """Scores the cases of what is left of a memory by its whole reference set."""

    def __init__(
        self, model: nn.Module, memory: RoutingMemory, force: bool, on_progress: OnProgress
    ) -> None:
        self.model = uncompiled(model)
        self.memory = memory
        self.on_progress = on_progress
        check_free(self.model)
        if not force:
            check_belongs(self.model, memory)
        routing = memory.routing
        wanted = memory.layers if routing.layers is None else routing.layers
        used = [layer for layer in wanted if routing.for_layer(layer).confidence_factor > 0]
        if not used:
            raise PruningError(
                f"The routing of {memory!r} is turned off, so its cases cannot be scored. Prune it "
                f"by chance, or calibrate it on other examples."
            )
        self.reference = memory.reference_tokens()
        if len(self.reference.owners.unique()) < 2:
            raise PruningError(
                f"{memory!r} has one example only, and cases are scored by what other examples "
                f"gain from them. Build it from more."
            )
        self.routers = [router for router in find_routers(self.model) if router.layer in used]

    def score(self, left: RoutingMemory, size: int) -> Tensor:
        """Score the cases of `left`, of which `size` are to stay. Shape [M] fp64."""
        batches = list(self.reference.batches(left.build.batch_tokens))
        forget_compiled_graphs()
        step = StepCounter(self.on_progress, len(batches)).steps_of(
            f"{len(left):,} → {size:,} cases"
        )
        return score_by_loss(self.model, self._recalls(left), batches, step)

    def _recalls(self, left: RoutingMemory) -> list[ScoredRecall]:
        """Recall what is left as the whole memory's routing does."""
        routing, full = self.memory.routing, left.full_layers()
        owner = owners(left.provenance)[left.provenance.window]
        similarity = SIMILARITIES[routing.similarity]
        recalls = []
        for router in self.routers:
            gamma = layer_gamma(self.memory, router.layer, routing, torch.device("cpu"))
            layer = full[router.layer]
            cases = Cases(router, layer.keys, layer.values, owner, gamma, similarity)
            recalls.append(ScoredRecall(cases, replace(routing, k=min(routing.k, len(left)))))
        return recalls


def _pruned_manifest(memory: RoutingMemory, kept: int, by: str, rounds: int) -> MemoryManifest:
    before = memory.manifest.pruned or {"cases": len(memory), "score": by}
    score = join_scores([before["score"], by])
    facts = {"cases": before["cases"], "kept": kept, "score": score, "rounds": rounds}
    return replace(memory.manifest, pruned=facts)
