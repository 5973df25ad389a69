"""The memories of one process, and whose each token of the flat batch is.

vLLM runs one model in a process. Its routers report here when they are made; memories are placed at
them when they are loaded; before each pass vLLM tells the memory of every token (`assign`) and its
position (`begin`), and each router calls `mix_`. Knows knn_moe, and of vLLM that a gate is a module
with a name and the weights it was loaded with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from knn_moe import RoutingConfig, RoutingMemory
from knn_moe.errors import (
    AttachError,
    ConfigError,
    RouterNotCalledError,
    UnsupportedModelError,
)
from knn_moe.inference.attach import choose_routers, open_recall
from knn_moe.recall.distilled import DistilledRecall
from knn_moe.recall.layer import Recall
from knn_moe.routers.find import Router
from torch import Tensor

from knn_moe_vllm.identity import check_belongs, usable_config
from knn_moe_vllm.placed import Placed
from knn_moe_vllm.slots import Slots

NOBODY: Final = 0  # vLLM's number for requests that name no adapter


class Store:
    """The memories of the model in this process."""

    def __init__(self) -> None:
        self.loading = False  # whether the routers that are made belong to the model served
        self.reset(all_here=True)

    def reset(self, *, all_here: bool) -> None:
        """Begin with a model whose routers are all in this process, or only some of them."""
        self.all_here = all_here
        self.gates: dict[int, Any] = {}
        self.memories: dict[int, Placed] = {}  # by vLLM's numbers, least recently used first
        self.usual: Placed | None = None  # of requests that name none
        self.slots: Slots | None = None  # where memories lie if passes are recorded and replayed
        self.owners: Tensor | None = None  # of the tokens of the next pass; None: nobody's
        self.uses: list[tuple[Placed, Tensor | None]] = []  # rows of this pass; None: all
        self.positions: Tensor | None = None
        self.called: set[int] = set()  # layers whose routers ever ran
        self.passes = 0

    @contextmanager
    def making_model(self, *, all_here: bool) -> Iterator[None]:
        """Take the routers that are made inside for those of the model served."""
        self.reset(all_here=all_here)
        self.loading = True
        try:
            yield
        finally:
            self.loading = False

    def add_gate(self, gate: Any) -> int:
        """Note a router, and return the number of its layer."""
        numbers = re.findall(r"(?:^|\.)(\d+)(?:\.|$)", gate.router_name)
        layer = int(numbers[0]) if numbers else 0
        if layer in self.gates:
            raise UnsupportedModelError(
                f"Layer {layer} has two routers, {self.gates[layer].router_name!r} and "
                f"{gate.router_name!r}. Memories know one."
            )
        self.gates[layer] = gate
        return layer

    def routers(self) -> list[Router]:
        """Return the routers of this process, in the order of their layers."""
        found = [
            Router(
                name=gate.router_name,
                layer=layer,
                num_experts=gate.output_size,
                hidden_size=gate.input_size,
                top_k=0,  # the experts are chosen by vLLM
                module=gate.loaded,
                scope=gate,
            )
            for layer, gate in sorted(self.gates.items())
            if gate.loaded is not None
        ]
        if not found:
            raise UnsupportedModelError(
                "This process has no router that memories can reach: vLLM runs the model's "
                "routers in another way than by GateLinear, or it has none."
            )
        return found

    def place(self, folder: str) -> Placed:
        """Open a memory and put it on the routers of this process. Nothing is changed.

        Raises:
            MemoryFormatError: There is no memory in `folder`.
            MemoryMismatchError: It was built for another model.
            ConfigError: It has a language-model head.
            RouterNotCalledError: vLLM goes around a router that it changes.
        """
        routers = self.routers()
        memory = RoutingMemory.from_pretrained(folder)
        config = usable_config(memory)
        check_belongs(memory, routers, all_here=self.all_here)
        if not self.all_here:
            memory, config = _part_of(memory, config, {router.layer for router in routers})
        chosen = choose_routers(routers, memory, config) if memory.layers else []
        if self.passes:
            self._check_called(router.layer for router in chosen)
        recalls = {router.layer: open_recall(router, memory, config) for router in chosen}
        if self.slots is not None:
            _check_fits(recalls, self.slots)
        return Placed(recalls, config.spare_first_token)

    def assign(self, numbers: Sequence[int]) -> None:
        """Tell whose each token of the next pass is, in the order of the flat batch."""
        self.owners = torch.as_tensor(numbers)
        if self.slots is not None:
            usual = {} if self.usual is None else {NOBODY: self.usual}
            self.slots.assign(self.owners, {**self.memories, **usual})

    def begin(self, positions: Tensor) -> None:
        """Begin a pass. Shapes: positions [T], or [3, T] where they are of several axes."""
        if self.passes == 1:
            used = self.usual, *self.memories.values()
            self._check_called(layer for each in used if each for layer in each.recalls)
        self.passes += 1
        self.positions = positions.amax(dim=0) if positions.ndim > 1 else positions
        if self.slots is None:
            self.uses = list(self._uses(self.positions.shape[0], positions.device))

    def _uses(self, tokens: int, device: torch.device) -> Iterator[tuple[Placed, Tensor | None]]:
        """Yield each memory that tokens of this pass use, and their rows; None: all of them."""
        if self.owners is None:
            if self.usual is not None:
                yield self.usual, None
            return
        owners = torch.zeros(tokens, dtype=torch.int64)
        owners[: len(self.owners)] = self.owners[:tokens]
        for number in owners.unique().tolist():
            placed = self.usual if number == NOBODY else self.memories.get(number)
            if placed is not None:
                rows = (owners == number).nonzero()[:, 0]
                yield placed, None if len(rows) == tokens else rows.to(device)

    def mix_(self, x: Tensor, logits: Tensor, layer: int) -> None:
        """Let each token's memory change its logits. Shapes: x [T, d]; logits [T, N]."""
        self.called.add(layer)
        if not self.uses and self.slots is None:
            return
        positions = self.positions
        if positions is None or len(positions) != len(x):
            told = 0 if positions is None else len(positions)
            raise AttachError(
                f"The router of layer {layer} got {len(x)} tokens in a pass of {told}, so they "
                f"cannot be told to memories."
            )
        if self.slots is not None:
            logits.copy_(self.slots.mix(layer, x, logits, positions))
            return
        for placed, rows in self.uses:
            if layer not in placed.recalls:
                continue
            if rows is None:
                logits.copy_(placed.mix(layer, x, logits, positions))
            else:
                logits[rows] = placed.mix(layer, x[rows], logits[rows], positions[rows])

    def _check_called(self, layers: Iterator[int]) -> None:
        """Raise RouterNotCalledError if a router that a memory changes did not run."""
        silent = [layer for layer in layers if layer not in self.called]
        if silent:
            raise RouterNotCalledError(
                f"vLLM ran the model without calling the router of layer {silent[0]}, so a memory "
                f"would do nothing there."
            )


def _check_fits(recalls: Mapping[int, Recall], slots: Slots) -> None:
    """Raise ConfigError if a memory cannot lie in the slots."""
    for layer, recall in recalls.items():
        if not isinstance(recall, DistilledRecall):
            raise ConfigError(
                "With CUDA graphs, memories that requests name must be distilled (`knn-moe "
                "distil`). Distil this one, or add --enforce-eager."
            )
        if len(recall.offsets) > slots.prototypes:
            raise ConfigError(
                f"This memory has {len(recall.offsets)} prototypes in layer {layer}, and there is "
                f'room for {slots.prototypes}. Set "prototypes" in "knn_moe" of the server.'
            )


def _part_of(
    memory: RoutingMemory, config: RoutingConfig, here: set[int]
) -> tuple[RoutingMemory, RoutingConfig]:
    """Return the layers of a memory that are both here and used."""
    wanted = memory.layers if config.layers is None else config.layers
    layers = {layer: memory.layers[layer] for layer in wanted if layer in here}
    return replace(memory, layers=layers), replace(config, layers=None)


STORE: Final = Store()
