"""Launches Triton kernels: on which device, with which constants, and how fast from eager code.

Knows kernels only as objects that its callers hand in, and imports no Triton.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

_EARLY_LAUNCH: Final = (9, 0)  # compute capability from which a kernel can wait for the one before
_MOST_KEPT: Final = 256  # ways in which a kernel was launched that are remembered


@cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def is_current(device: torch.device) -> bool:
    """Return whether `device` is current: kernels run on the current one, not the tensors'."""
    return device.type != "cuda" or device.index == torch.cuda.current_device()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current one inside."""
    return nullcontext() if is_current(device) else torch.cuda.device(device)


def device_constants(device: torch.device) -> dict[str, int]:
    """Return whether kernels may contain PTX (ASM) and be launched before the previous one has
    ended (PDL)."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    early = nvidia and torch.cuda.get_device_capability(device) >= _EARLY_LAUNCH
    return {"ASM": int(nvidia), "PDL": int(early)}


def select_constants(kernel: Any, constants: Mapping[str, int]) -> dict[str, Any]:
    """Return the constants that a kernel takes, in its order, and how it may be launched."""
    taken = {name: constants[name] for name in kernel.arg_names if name in constants}
    return taken | ({"launch_pdl": True} if taken.get("PDL") else {})


class KernelLauncher:
    """Launches a kernel, some of whose tensors never change, as it was compiled the first time.

    That skips Triton's look at the arguments. This class makes sure that they are what the kernel
    was compiled for: the same dtype of the first, the same numbers, all tensors aligned.

    Args:
        kernel: The Triton kernel.
        fixed: Its tensors that never change.
        constants: What it may be compiled for; see `select_constants`.
        options: How it is compiled: num_warps, num_stages.
    """

    def __init__(
        self, kernel: Any, fixed: tuple[Tensor, ...], constants: Mapping[str, int], **options: int
    ) -> None:
        self.kernel = kernel
        self.fixed = fixed
        self.fixed_pointers = [tensor.data_ptr() for tensor in fixed]
        self.options = select_constants(kernel, constants) | options
        self.constants = [constants[name] for name in kernel.arg_names if name in constants]
        self.compiled: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        *,
        before: tuple[Tensor, ...],
        after: tuple[Tensor, ...],
        numbers: tuple[int, ...],
    ) -> None:
        """Launch, with arguments in the kernel's order: `before`, the fixed, `after`, numbers."""
        first = [tensor.data_ptr() for tensor in before]
        last = [tensor.data_ptr() for tensor in after]
        compiled_for = (before[0].dtype, grid, numbers)
        aligned = not any(pointer & 15 for pointer in (*first, *last))
        run = self.compiled.get(compiled_for) if aligned else None
        if run is not None:
            run(*first, *self.fixed_pointers, *last, *numbers, *self.constants)
            return
        tensors = (*before, *self.fixed, *after)
        compiled = self.kernel[grid](*tensors, *numbers, **self.options)
        # The interpreter compiles nothing.
        if aligned and compiled is not None and len(self.compiled) < _MOST_KEPT:
            self.compiled[compiled_for] = compiled[grid]
