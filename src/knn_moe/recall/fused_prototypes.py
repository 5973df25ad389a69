"""A distilled layer on a GPU, from router input to mixed logits: one memory's, or several stacked.

Eager code launches the kernels directly; compiled code calls one operator, which CUDA graphs can
capture.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from knn_moe.index.fast.launcher import has_triton, is_current, on_device
from knn_moe.recall.launch_prototypes import PrototypeLauncher
from knn_moe.recall.prototype_tensors import PrototypeTensors


def kernels_usable(device: torch.device) -> bool:
    """Return whether the kernels of distilled layers run on `device`."""
    return device.type == "cuda" and has_triton()


class FusedPrototypes(nn.Module):
    """Prototypes as the kernels read them.

    A module, so that compilers treat its tensors as static.
    """

    def __init__(self, tensors: PrototypeTensors, top: int) -> None:
        """See PrototypeLauncher."""
        super().__init__()
        self.top = top
        for name, tensor in tensors._asdict().items():
            self.register_buffer(name, tensor, persistent=False)
        self._launch = PrototypeLauncher(tensors, top)

    @property
    def tensors(self) -> PrototypeTensors:
        """The tensors."""
        return PrototypeTensors(*self._ordered_tensors())

    def forward(
        self,
        inputs: Tensor,
        logits: Tensor,
        counts: Tensor,
        real: Tensor | None,
        slots: Tensor | None = None,
        calls: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return mixed logits and confidence: see PrototypeLauncher."""
        if torch.compiler.is_compiling():
            mixed, confidence = torch.ops.knn_moe.recall_prototypes(
                inputs, logits, counts, real, slots, calls, self._ordered_tensors(), self.top
            )
            return mixed, confidence
        if is_current(inputs.device):
            return self._launch(inputs, logits, counts, real, slots, calls)
        with torch.cuda.device(inputs.device):
            return self._launch(inputs, logits, counts, real, slots, calls)

    def _ordered_tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in PrototypeTensors._fields]


@torch.library.custom_op("knn_moe::recall_prototypes", mutates_args=("counts",))
def _recall_prototypes(
    inputs: Tensor,
    logits: Tensor,
    counts: Tensor,
    real: Tensor | None,
    slots: Tensor | None,
    calls: Tensor | None,
    tensors: list[Tensor],
    top: int,
) -> tuple[Tensor, Tensor]:
    with on_device(inputs.device):
        launch = PrototypeLauncher(PrototypeTensors(*tensors), top)
        return launch(inputs, logits, counts, real, slots, calls)


@_recall_prototypes.register_fake
def _(
    inputs: Tensor,
    logits: Tensor,
    counts: Tensor,
    real: Tensor | None,
    slots: Tensor | None,
    calls: Tensor | None,
    tensors: list[Tensor],
    top: int,
) -> tuple[Tensor, Tensor]:
    mixed = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return mixed, inputs.new_empty(len(inputs), dtype=torch.float32)
