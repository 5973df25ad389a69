"""Compile every launch of the kernels for a GPU, as a script: it takes a compiler and no GPU.

Stand-ins for the kernels record the launches of index/fast/launch.py; then the real ones are
compiled with the recorded arguments. It prints the names of the kernels that were compiled.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from knn_moe.index import FastIndex, IndexConfig
from knn_moe.index.fast import kernels, launch
from knn_moe.index.fast.tensors import KernelConfig, kernel_constants, prepare_tensors
from knn_moe.index.fast.values import PackedValues

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


class Recorder:
    """Stands in for the kernels and records how each is launched."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        launches = self.launches

        class Kernel:
            arg_names = getattr(kernels, name).arg_names

            def __getitem__(self, grid: object) -> Any:
                return lambda *args, **options: launches.append((name, args, options))

        return Kernel()


def record(target: Target) -> Recorder:
    """Return the launches for one query, for a small batch and for a prefill."""
    keys = torch.randn(700, 96, generator=torch.Generator().manual_seed(0)).to(target.dtype)
    options = {"dims": 64, "bits": target.bits, "probes": 3}
    index = FastIndex.build(keys, IndexConfig(kind="fast", **options))
    values = PackedValues.of(torch.randn(700, 60), target.value_bits)
    tensors = prepare_tensors(index, values, torch.ones(3))
    tensors = tensors._replace(points=tensors.points.bfloat16())  # as on a GPU
    config = KernelConfig(target.k, index.probes, target.cosine, top_k=8)
    on_gpu = {"ASM": 1, "PDL": int(target.capability >= 90)}
    recorder, counts = Recorder(), torch.zeros(4, dtype=torch.int64)
    launch.kernel_constants = lambda *args: kernel_constants(*args) | on_gpu
    launch.kernels = lambda: recorder
    for queries in (1, 9, 300):
        inputs, logits = (torch.randn(queries, width).to(target.dtype) for width in (96, 60))
        real = torch.ones(queries, dtype=torch.bool) if target.padded else None
        launch.recall(inputs, logits, counts, real, tensors, config)
        launch.search(inputs, tensors, config)
    return recorder


def compile_launches(target: Target) -> set[str]:
    """Compile each different launch once, and return the kernels' names."""
    done = set()
    for name, args, options in record(target).launches:
        kernel = getattr(kernels, name)
        signature = {
            parameter: TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
            for parameter, value in zip(kernel.arg_names, args, strict=False)
        }
        known = {option: value for option, value in options.items() if option in kernel.arg_names}
        key = name, tuple(signature.items()), tuple(known.items())
        if key in done:
            continue
        done.add(key)
        constants = {(kernel.arg_names.index(option),): value for option, value in known.items()}
        source = ASTSource(kernel, signature | dict.fromkeys(known, "constexpr"), constants, {})
        chosen = {option: value for option, value in options.items() if option not in known}
        gpu = GPUTarget("cuda", target.capability, 32)
        assert triton.compile(source, target=gpu, options=chosen).asm["cubin"], name
    return {name for name, *_ in done}


if __name__ == "__main__":
    compiled = set.intersection(*(compile_launches(target) for target in TARGETS))
    sys.stdout.write("\n".join(sorted(compiled)))
