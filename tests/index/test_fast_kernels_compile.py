"""Every launch of the kernels compiles for a GPU, which takes a compiler and no GPU.

The launches are those of index/launch.py, taken down by stand-ins for the kernels, then compiled by
the real ones, in a process of its own: where the tests' kernels are made for triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from knn_moe.index import FastIndex, IndexConfig
from knn_moe.index.fast import kernels, launch
from knn_moe.index.fast import tensors as parts
from knn_moe.index.fast.values import PackedValues

capability, k, bits, value_bits, dtype = int(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5]
dtype = getattr(torch, dtype)
keys = torch.randn(700, 96, generator=torch.Generator().manual_seed(0))
index = FastIndex.build(keys.to(dtype), IndexConfig(kind="fast", dims=64, bits=bits, probes=3))
values = PackedValues.of(torch.randn(700, 60), value_bits)
made = parts.make_parts(index, values, torch.ones(3))
made = made._replace(points=made.points.bfloat16())  # as on a GPU
settings = parts.Settings(k, index.probes, 0, 8)
launches = []

class Kernel:
    def __init__(self, name):
        self.name = name
    def __getitem__(self, grid):
        return lambda *args, **options: launches.append((self.name, args, options))

class Kernels:
    def __getattr__(self, name):
        return Kernel(name)

shapes_of = parts.shapes_of
launch.shapes_of = lambda *args: shapes_of(*args)._replace(asm=1, pdl=int(capability >= 90))
launch.kernels = Kernels
counts = torch.zeros(4, dtype=torch.int64)
for queries in (1, 9, 300):
    inputs, logits = torch.randn(queries, 96).to(dtype), torch.randn(queries, 60).to(dtype)
    for real in (None, torch.ones(queries, dtype=torch.bool)):
        launch.recall(inputs, logits, counts, real, made, settings)
    launch.nearest(inputs, made, settings)

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64",
         torch.int32: "i32", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1"}
done = set()
for name, args, options in launches:
    kernel = getattr(kernels, name)
    signature, constants, chosen = {}, {}, {}
    for parameter, value in zip(kernel.arg_names, args):
        tensor = isinstance(value, torch.Tensor)
        signature[parameter] = f"*{NAMES[value.dtype]}" if tensor else "i32"
    for option, value in options.items():
        if option in kernel.arg_names:
            signature[option], constants[(kernel.arg_names.index(option),)] = "constexpr", value
        else:
            chosen[option] = value
    key = name, tuple(signature.items()), tuple(constants.items())
    if key not in done:
        done.add(key)
        source = ASTSource(kernel, signature, constants, {})
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=chosen)
        assert built.asm["cubin"], name
print(*sorted({name for name, *_ in done}))
"""


@pytest.mark.parametrize(
    ("capability", "k", "bits", "value_bits", "dtype"),
    [(90, 1, 4, 8, "bfloat16"), (90, 5, 8, 4, "float16"), (80, 2, 4, 8, "float32")],
)
def test_every_launch_compiles(
    capability: int, k: int, bits: int, value_bits: int, dtype: str
) -> None:
    asked = [str(value) for value in (capability, k, bits, value_bits, dtype)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE, *asked], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    from knn_moe.index import kernels

    assert result.stdout.split() == sorted(kernels.__all__)
