"""A layer's recall on a GPU, from router input to mixed logits, by the kernels of `fast`.

Launched directly from eager code; from compiled code as one operator, which CUDA graphs capture.
Needs triton: `usable` says whether it is there. Kernels are compiled when they are first met.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Final

import torch
from torch import Tensor, nn

from knn_moe.index.fast.index import MOST_FOUND, FastIndex
from knn_moe.index.fast.launch import FEW, FewLauncher, nearest, recall
from knn_moe.index.fast.tensors import Parts, Settings, make_parts
from knn_moe.index.fast.values import PackedValues

MOST_RANKED: Final = 128  # experts up to which changes are counted by the kernels


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable(device: torch.device, k: int) -> bool:
    return device.type == "cuda" and k <= MOST_FOUND and _has_triton()


class Fused(nn.Module):
    """FastIndex and PackedValues as the kernels want them, as buffers that compilers take for
    static tensors."""

    def __init__(
        self, index: FastIndex, values: PackedValues, kernel: Tensor, settings: Settings
    ) -> None:
        """`kernel` [3]: see Parts."""
        super().__init__()
        self.settings = settings
        parts = make_parts(index, values, kernel)
        for name, tensor in parts._asdict().items():
            self.register_buffer(name, tensor, persistent=False)
        # One copy of the projection: the index keeps a view.
        index.projection = parts.stacked[: len(index.projection)]
        self._few = FewLauncher(parts, settings)

    def forward(
        self, inputs: Tensor, logits: Tensor, counts: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See launch.recall."""
        if torch.compiler.is_compiling():
            parts = [getattr(self, name) for name in Parts._fields]
            mixed, confidence = torch.ops.knn_moe.recall(
                inputs, logits, counts, real, parts, list(self.settings)
            )
            return mixed, confidence
        run = self._few if inputs.shape[0] <= FEW else self._recall
        if _is_current(inputs.device):
            return run(inputs, logits, counts, real)
        with torch.cuda.device(inputs.device):
            return run(inputs, logits, counts, real)

    def _recall(
        self, inputs: Tensor, logits: Tensor, counts: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return recall(inputs, logits, counts, real, self._few.parts, self.settings)

    def search(self, inputs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See launch.nearest."""
        settings = self.settings._replace(k=k)
        if torch.compiler.is_compiling():
            parts = [getattr(self, name) for name in Parts._fields]
            distances, places = torch.ops.knn_moe.nearest(inputs, parts, list(settings))
            return distances, places
        with _on(inputs.device):
            return nearest(inputs, self._few.parts, settings)


def _is_current(device: torch.device) -> bool:
    """Kernels are launched on the current device, which need not be the tensors'."""
    return device.type != "cuda" or device.index == torch.cuda.current_device()


def _on(device: torch.device) -> AbstractContextManager[object]:
    return nullcontext() if _is_current(device) else torch.cuda.device(device)


@torch.library.custom_op("knn_moe::recall", mutates_args=("counts",))
def _recall(
    inputs: Tensor,
    logits: Tensor,
    counts: Tensor,
    real: Tensor | None,
    parts: list[Tensor],
    settings: list[int],
) -> tuple[Tensor, Tensor]:
    with _on(inputs.device):
        return recall(inputs, logits, counts, real, Parts(*parts), Settings(*settings))


@_recall.register_fake
def _(
    inputs: Tensor,
    logits: Tensor,
    counts: Tensor,
    real: Tensor | None,
    parts: list[Tensor],
    settings: list[int],
) -> tuple[Tensor, Tensor]:
    mixed = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return mixed, inputs.new_empty(len(inputs), dtype=torch.float32)


@torch.library.custom_op("knn_moe::nearest", mutates_args=())
def _nearest(inputs: Tensor, parts: list[Tensor], settings: list[int]) -> tuple[Tensor, Tensor]:
    with _on(inputs.device):
        return nearest(inputs, Parts(*parts), Settings(*settings))


@_nearest.register_fake
def _(inputs: Tensor, parts: list[Tensor], settings: list[int]) -> tuple[Tensor, Tensor]:
    distances = inputs.new_empty(len(inputs), settings[0], dtype=torch.float32)
    return distances, distances.to(torch.int64)
