"""Compile every launch of the kernels for a GPU, as a script: it takes a compiler and no GPU.

Stand-ins for the kernels record the launches of index/fast/launch.py and of
recall/launch_prototypes.py; then the real ones are compiled with the recorded arguments. It prints
the names of the kernels that were compiled.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from knn_moe.index import FastIndex, IndexConfig
from knn_moe.index.fast import kernels as search_kernels
from knn_moe.index.fast import launch
from knn_moe.index.fast.tensors import KernelConfig, kernel_constants, prepare_tensors
from knn_moe.index.fast.values import PackedValues
from knn_moe.recall import kernels as prototype_kernels
from knn_moe.recall import launch_prototypes
from knn_moe.recall.launch_prototypes import PrototypeLauncher
from knn_moe.recall.prototype_tensors import PrototypeTensors

TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64",
    torch.int32: "*i32", torch.int8: "*i8", torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip


class Target(NamedTuple):
    """A GPU, and what is asked of it."""

    capability: int
    padded: bool
    k: int
    bits: int
    value_bits: int
    cosine: int
    dtype: torch.dtype


# Between them they take both sides of every branch in a kernel.
TARGETS = [
    Target(90, padded=False, k=1, bits=4, value_bits=8, cosine=0, dtype=torch.bfloat16),
    Target(80, padded=True, k=5, bits=8, value_bits=4, cosine=1, dtype=torch.float16),
]
SHARED = {80: 166_912, 90: 232_448}  # bytes that programs of a GPU may share


class Recorder:
    """Stands in for the kernels of a package and records how each is launched."""

    def __init__(self, package: ModuleType) -> None:
        self.package = package
        self.launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        launches, kernel = self.launches, getattr(self.package, name)

        class Kernel:
            arg_names = kernel.arg_names

            def __getitem__(self, grid: object) -> Any:
                return lambda *args, **options: launches.append((kernel, args, options))

        return Kernel()


def record(target: Target) -> Recorder:
    """Return the launches of `fast` for one query, for a small batch and for a prefill."""
    keys = torch.randn(700, 96, generator=torch.Generator().manual_seed(0)).to(target.dtype)
    options = {"dims": 64, "bits": target.bits, "probes": 3}
    index = FastIndex.build(keys, IndexConfig(kind="fast", **options))
    values = PackedValues.of(torch.randn(700, 60), target.value_bits)
    tensors = prepare_tensors(index, values, torch.ones(3))
    tensors = tensors._replace(points=tensors.points.bfloat16())  # as on a GPU
    config = KernelConfig(target.k, index.probes, target.cosine, top_k=8)
    on_gpu = {"ASM": 1, "PDL": int(target.capability >= 90)}
    recorder, counts = Recorder(search_kernels), torch.zeros(4, dtype=torch.int64)
    launch.kernel_constants = lambda *args: kernel_constants(*args) | on_gpu
    launch.kernels = lambda: recorder
    for queries in (1, 9, 300):
        inputs, logits = (torch.randn(queries, width).to(target.dtype) for width in (96, 60))
        real = torch.ones(queries, dtype=torch.bool) if target.padded else None
        launch.recall(inputs, logits, counts, real, tensors, config)
        launch.search(inputs, tensors, config)
    return recorder


def record_prototypes(target: Target) -> Recorder:
    """Return the launches of distilled layers: each block of the tables, one memory or three."""
    recorder, memories = Recorder(prototype_kernels), 3 if target.padded else 1
    on_gpu = {"ASM": 1, "PDL": int(target.capability >= 90)}
    launch_prototypes.device_constants = lambda device: on_gpu
    launch_prototypes.kernels = lambda: recorder
    for dtype, experts, width, sizes in [
        (target.dtype, 60, 200, (1, 16, 32, 64, 1024, 8192)),
        (target.dtype, 512, 192, (64, 8192)),
        (torch.float32, 128, 200, (1, 16, 8192)),
    ]:
        tensors = PrototypeTensors(
            factors=torch.zeros(memories, experts + 300, width, dtype=dtype),
            centre=torch.zeros(memories, width),
            offsets=torch.zeros(memories, 300),
            updates=torch.zeros(memories, 300, experts),
            sizes=torch.full([memories], 300, dtype=torch.int32),
            widths=torch.ones(memories, 4),
        )
        launcher = PrototypeLauncher(tensors, top=8 if experts <= 128 else 0)
        for tokens in sizes:
            given: list[torch.Tensor | None] = [None] * 3
            if target.padded:
                real = torch.ones(tokens, dtype=torch.bool)
                slots = torch.zeros(tokens, dtype=torch.int32)
                given = [real, slots, torch.ones(memories, dtype=torch.int64)]
            inputs, logits = (torch.zeros(tokens, size, dtype=dtype) for size in (width, experts))
            launcher(inputs, logits, torch.zeros(memories, 4, dtype=torch.int64), *given)
    return recorder


def compile_launches(target: Target) -> set[str]:
    """Compile each different launch once, and return the kernels' names."""
    done = {}
    for kernel, args, options in record(target).launches + record_prototypes(target).launches:
        signature = {
            parameter: TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
            for parameter, value in zip(kernel.arg_names, args, strict=False)
        }
        known = {option: value for option, value in options.items() if option in kernel.arg_names}
        chosen = {option: value for option, value in options.items() if option not in known}
        key = kernel, *(tuple(each.items()) for each in (signature, known, chosen))
        if key in done:
            continue
        constants = {(kernel.arg_names.index(option),): value for option, value in known.items()}
        # Tensors are aligned, which decides how blocks are copied and how much of them is shared.
        tensors = [index for index, value in enumerate(args) if isinstance(value, torch.Tensor)]
        aligned = {(index,): [["tt.divisibility", 16]] for index in tensors}
        source = ASTSource(
            kernel, signature | dict.fromkeys(known, "constexpr"), constants, aligned
        )
        gpu = GPUTarget("cuda", target.capability, 32)
        compiled = done[key] = triton.compile(source, target=gpu, options=chosen)
        assert compiled.asm["cubin"], kernel
        assert compiled.metadata.shared <= SHARED[target.capability], (kernel, options)
    return {kernel.__name__ for kernel, *_ in done}


if __name__ == "__main__":
    names = set.intersection(*(compile_launches(target) for target in TARGETS))
    sys.stdout.write("\n".join(sorted(names)))
