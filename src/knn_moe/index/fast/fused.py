"""One layer's recall on a GPU, from router input to mixed logits, by the kernels of `fast`.

Eager code launches the kernels directly; compiled code calls one operator, which CUDA graphs can
capture. Triton is needed only here: `kernels_usable` says whether it is installed.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from knn_moe.index.fast.index import MOST_FOUND, FastIndex
from knn_moe.index.fast.launch import DECODE_QUERIES, DecodeLauncher, recall, search
from knn_moe.index.fast.launcher import has_triton, is_current, on_device
from knn_moe.index.fast.tensors import KernelConfig, KernelTensors, prepare_tensors
from knn_moe.index.fast.values import PackedValues

MOST_RANKED: Final = 128  # experts up to which the kernels count changed choices


def kernels_usable(device: torch.device, k: int) -> bool:
    """Return whether the kernels can find `k` neighbours on `device`."""
    return device.type == "cuda" and k <= MOST_FOUND and has_triton()


class FusedRecall(nn.Module):
    """A FastIndex and its PackedValues as the kernels read them.

    A module, so that compilers treat its tensors as static.
    """

    def __init__(
        self, index: FastIndex, values: PackedValues, widths: Tensor, config: KernelConfig
    ) -> None:
        """Prepare the tensors. Shapes: widths [3], see `prepare_tensors`."""
        super().__init__()
        self.config = config
        tensors = prepare_tensors(index, values, widths)
        for name, tensor in tensors._asdict().items():
            self.register_buffer(name, tensor, persistent=False)
        # One copy of the projection: the index keeps a view.
        index.projection = tensors.stacked[: len(index.projection)]
        self._decode = DecodeLauncher(tensors, config)

    def forward(
        self, inputs: Tensor, logits: Tensor, counts: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return mixed logits and confidence: see `launch.recall`."""
        if torch.compiler.is_compiling():
            mixed, confidence = torch.ops.knn_moe.recall(
                inputs, logits, counts, real, self._ordered_tensors(), list(self.config)
            )
            return mixed, confidence
        run = self._decode if inputs.shape[0] <= DECODE_QUERIES else self._recall
        if is_current(inputs.device):
            return run(inputs, logits, counts, real)
        with torch.cuda.device(inputs.device):
            return run(inputs, logits, counts, real)

    def _recall(
        self, inputs: Tensor, logits: Tensor, counts: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return recall(inputs, logits, counts, real, self._decode.tensors, self.config)

    def search(self, inputs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k nearest by estimate: see `launch.search`."""
        config = self.config._replace(k=k)
        if torch.compiler.is_compiling():
            distances, places = torch.ops.knn_moe.search(
                inputs, self._ordered_tensors(), list(config)
            )
            return distances, places
        with on_device(inputs.device):
            return search(inputs, self._decode.tensors, config)

    def _ordered_tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in KernelTensors._fields]


@torch.library.custom_op("knn_moe::recall", mutates_args=("counts",))
def _recall(
    inputs: Tensor,
    logits: Tensor,
    counts: Tensor,
    real: Tensor | None,
    tensors: list[Tensor],
    config: list[int],
) -> tuple[Tensor, Tensor]:
    with on_device(inputs.device):
        return recall(inputs, logits, counts, real, KernelTensors(*tensors), KernelConfig(*config))


@_recall.register_fake
def _(
    inputs: Tensor,
    logits: Tensor,
    counts: Tensor,
    real: Tensor | None,
    tensors: list[Tensor],
    config: list[int],
) -> tuple[Tensor, Tensor]:
    mixed = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return mixed, inputs.new_empty(len(inputs), dtype=torch.float32)


@torch.library.custom_op("knn_moe::search", mutates_args=())
def _search(inputs: Tensor, tensors: list[Tensor], config: list[int]) -> tuple[Tensor, Tensor]:
    with on_device(inputs.device):
        return search(inputs, KernelTensors(*tensors), KernelConfig(*config))


@_search.register_fake
def _(inputs: Tensor, tensors: list[Tensor], config: list[int]) -> tuple[Tensor, Tensor]:
    distances = inputs.new_empty(len(inputs), config[0], dtype=torch.float32)
    return distances, distances.to(torch.int64)
