"""Make a memory smaller: keep the cases that other examples gain from most, or any.

Exact repeats go first: of cases that read the same tokens, the worthiest stays. The rest go by what
they are worth (by_loss.py, by_values.py), about half of them at a time: when many are gone, others
are recalled in their place, and what those are worth is found anew. Or by chance, which favours no
example: what is left can still be calibrated on its own reference set. A case is kept or dropped on
all layers at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor, nn

from knn_moe.adapt.calibrate.splits import Slice, own_reference
from knn_moe.adapt.prune.by_loss import worth_by_loss
from knn_moe.adapt.prune.by_values import worth_by_values
from knn_moe.adapt.prune.recalled import Layer
from knn_moe.equations.similarity import SIMILARITIES
from knn_moe.errors import ConfigError, PruningError
from knn_moe.inference.attach import check_belongs
from knn_moe.memory.files import refuse_existing
from knn_moe.memory.manifest import BY_CHANCE, MemoryManifest, joined_scores
from knn_moe.memory.memory import RoutingMemory
from knn_moe.recall.recall import layer_gammas, layer_widths
from knn_moe.reference.provenance import owners
from knn_moe.routers.find import Router, find_routers
from knn_moe.routers.intercept import find_hook
from knn_moe.routers.model_state import forget_compiled_graphs

OnProgress = Callable[[str, int, int], None]
PruneBy: TypeAlias = Literal["loss", "values", "chance"]


def prune(
    model: nn.Module | None,
    memory: RoutingMemory,
    keep: float = 0.1,
    *,
    by: PruneBy | None = None,
    folder: str | Path | None = None,
    overwrite: bool = False,
    force: bool = False,
    on_progress: OnProgress = lambda what, done, total: None,
) -> RoutingMemory:
    """The share `keep` of the memory's cases, those that are worth most to its other examples.

    By "loss", as with a model unless told otherwise, a case is worth what it takes off the loss of
    reference tokens of other examples; by "values", as without one, about that, guessed from the
    values; by "chance" all are worth the same: calibrate what is left. Cases are recalled as the
    memory's own routing does, by exact search. γ, widths and what a calibration found are kept.
    Written to `folder` and opened from there; without one, to a temporary folder that lives as long
    as the memory. `force`: as in `attach`, for a memory of another model of the same shape.
    """
    by = by or ("values" if model is None else "loss")
    _check(model, memory, keep, by)
    if folder is not None:
        refuse_existing(Path(folder), overwrite=overwrite)
    rows, manifest = torch.arange(len(memory)), memory.manifest
    count = max(1, round(keep * len(memory)))
    if count < len(memory):
        worth, sizes = _drawn, [count]
        if by != BY_CHANCE:
            judges = _plain(model) if by == "loss" else None
            worth = _Judge(judges, memory, force, on_progress).worth
            sizes = _sizes(len(memory), count)
        for size in sizes:
            left = memory if len(rows) == len(memory) else memory.subset(rows)
            rows = rows[best(worth(left, size), left.provenance.prefix_hash(), size)]
        manifest = _manifest(memory, len(rows), by, len(sizes))
    return memory.subset(rows, manifest=manifest, folder=folder, overwrite=overwrite)


def _check(model: nn.Module | None, memory: RoutingMemory, keep: float, by: str) -> None:
    if not 0 < keep <= 1:
        raise ConfigError(f"keep must be above 0 and at most 1, got {keep}.")
    if by not in get_args(PruneBy):
        raise ConfigError(f"by must be one of {', '.join(get_args(PruneBy))}, got {by!r}.")
    if by == "loss" and model is None:
        raise ConfigError("To prune by loss takes the model: give it, or prune by values.")
    memory.full_layers()
    if memory.routing.drawn is not None:
        raise PruningError(
            "This memory is a control, used with cases drawn at random: prune the memory it was "
            "made from."
        )


def _sizes(cases: int, count: int) -> list[int]:
    """Down to `count`, in steps of about a half."""
    rounds = max(1, round(math.log2(cases / count)))
    return [round(cases * (count / cases) ** (step / rounds)) for step in range(1, rounds + 1)]


def best(worth: Tensor, case: Tensor, count: int) -> Tensor:
    """The `count` rows worth most, ascending; of equal cases one comes before the second of any.

    Shapes: worth [M]; case [M] int64, equal for keys that are one case → [count] int64.
    """
    order = torch.argsort(worth, descending=True, stable=True)
    _, first = np.unique(case[order].numpy(), return_index=True)
    repeat = torch.ones(len(order), dtype=torch.bool)
    repeat[torch.from_numpy(first)] = False
    ranked = torch.cat([order[~repeat], order[repeat]])
    return ranked[:count].sort().values


def _drawn(memory: RoutingMemory, size: int) -> Tensor:
    """No case is worth more than another; the same draw every time. Shape [M]."""
    return torch.rand(len(memory), generator=torch.Generator().manual_seed(len(memory)))


class _Judge:
    """What cases are worth: to a model, or to each other."""

    def __init__(
        self, model: nn.Module | None, memory: RoutingMemory, force: bool, on_progress: OnProgress
    ) -> None:
        self.model = model
        self.memory = memory
        self.routing = memory.routing
        self.on_progress = on_progress
        wanted = memory.layers if self.routing.layers is None else self.routing.layers
        self.layers = [
            index for index in wanted if self.routing.for_layer(index).confidence_factor > 0
        ]
        if not self.layers and len(memory):
            raise PruningError(
                f"{memory!r} was told to keep silent, so none of its cases is worth anything: "
                f"calibrate it on other examples, or do without it."
            )
        if len(owners(memory.provenance).unique()) < 2:
            raise PruningError(
                f"{memory!r} has one example only, and cases are judged by what other examples "
                f"gain from them: build it from more."
            )
        self.routers = _routers(model, memory, self.layers, force) if model is not None else []
        windows = range(len(memory.provenance.example_of_window))
        self.reading = Slice(own_reference(memory), list(windows), owners(memory.provenance))

    def worth(self, memory: RoutingMemory, size: int) -> Tensor:
        """Of each case of `memory`, of which `size` are to stay. Shape [M] fp64."""
        layers = self._open(memory)
        if self.model is None:
            step = self._steps(len(layers), len(memory), size)
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            return worth_by_values(self._open(self.memory), layers, device, step)
        readings = list(self.reading.readings(memory.build.batch_tokens))
        forget_compiled_graphs()
        step = self._steps(len(readings), len(memory), size)
        return worth_by_loss(self.model, self.routers, layers, readings, step)

    def _open(self, memory: RoutingMemory) -> dict[int, Layer]:
        """Its layers as the whole memory's routing has them."""
        owner = self.reading.owner[memory.provenance.window]
        full, routing, opened = memory.full_layers(), self.routing, {}
        for index in self.layers:
            gammas = layer_gammas(self.memory, index, routing, torch.device("cpu"))
            opened[index] = Layer(
                full[index],
                owner,
                layer_widths(gammas.joint, index, routing),
                SIMILARITIES[routing.similarity],
                min(routing.k, len(memory)),
                gammas.ratio(memory.provenance),
            )
        return opened

    def _steps(self, total: int, cases: int, size: int) -> Callable[[], None]:
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            self.on_progress(f"{cases:,} → {size:,} cases", done, total)

        return step


def _routers(
    model: nn.Module, memory: RoutingMemory, layers: list[int], force: bool
) -> list[Router]:
    if not force:
        check_belongs(model, memory)
    routers = find_routers(model)
    for router in routers:
        if find_hook(router) is not None:
            raise PruningError(
                f"The model has a memory attached (at {router.name!r}): detach it to prune one."
            )
    return [router for router in routers if router.layer in layers]


def _plain(model: nn.Module | None) -> Any:
    return getattr(model, "_orig_mod", model)  # torch.compile's wrapper would trace our hooks


def _manifest(memory: RoutingMemory, kept: int, by: str, rounds: int) -> MemoryManifest:
    before = memory.manifest.pruned or {"cases": len(memory), "score": by}
    score = joined_scores([before["score"], by])
    facts = {"cases": before["cases"], "kept": kept, "score": score, "rounds": rounds}
    return replace(memory.manifest, pruned=facts)
