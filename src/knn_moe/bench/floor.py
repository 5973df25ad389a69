"""The machine a benchmark runs on, and the shortest time that a search could take there.

Knows what each index must read and multiply at least; nothing of how it is timed.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from knn_moe.bench.timing import quickest
from knn_moe.index import FastIndex, IndexConfig, KeyIndex
from knn_moe.index.faiss import ivfpq_layout
from knn_moe.index.fast.index import candidates

_COPIED_BYTES: Final = {"cuda": 1 << 31, "cpu": 1 << 28}  # more than a cache holds
_SQUARE: Final = {"cuda": 8192, "cpu": 2048}  # rows of the matrices multiplied


class Rates(NamedTuple):
    """The best a machine was seen to do: a large copy, a large matrix product."""

    bytes_per_second: float  # read and written
    operations_per_second: float  # additions and multiplications


class Reads(NamedTuple):
    """What a search reads. Each number is multiplied once for each query that reads it."""

    key_bytes: float  # codes of all keys
    key_numbers: float
    share: float = 1.0  # of the lists of keys, that one query probes
    other_bytes: float = 0.0  # the same for every query: projection and centres
    other_numbers: float = 0.0
    query_bytes: float = 0.0  # for each query: the keys it ranks again


class Floor(NamedTuple):
    """Seconds that reading and arithmetic take by themselves; the longer one bounds a search."""

    reading: float
    arithmetic: float

    @property
    def seconds(self) -> float:
        return max(self)

    @property
    def bound(self) -> str:
        return "bytes" if self.reading >= self.arithmetic else "sums"


def search_floor(reads: Reads, batch: int, rates: Rates) -> Floor:
    """Return the shortest time of a search for `batch` queries, at the rates of this machine.

    Bytes: each is read once, however many queries need it. Queries probe lists at random, so
    1 - (1 - share)^batch of the codes are read, which is all of them for many queries. Arithmetic:
    a multiplication and an addition for each number that a query reads. Not counted: launches,
    choosing the nearest, values and mixing. Codes that stay in a cache beat this floor.
    """
    read_share = 1 - (1 - reads.share) ** batch
    read = reads.other_bytes + read_share * reads.key_bytes + batch * reads.query_bytes
    numbers = reads.other_numbers + reads.share * reads.key_numbers
    return Floor(read / rates.bytes_per_second, 2 * batch * numbers / rates.operations_per_second)


def count_reads(index: KeyIndex, config: IndexConfig, keys: Tensor, k: int) -> Reads:
    """Return the fewest bytes that an index of `keys` [M, d] reads for the k nearest."""
    count, width = keys.shape
    reranked = min(candidates(k), count) if config.rerank else 0
    query_bytes = float(reranked * width * keys.itemsize)
    if isinstance(index, FastIndex):
        lists, dims = index.centres.shape
        return Reads(
            key_bytes=index.codes.nbytes + index.norms.nbytes,
            key_numbers=count * dims,
            share=index.probes / lists,
            other_bytes=index.projection.nbytes + index.centres.nbytes,
            other_numbers=index.projection.numel() + index.centres.numel(),
            query_bytes=query_bytes,
        )
    if config.kind == "ivfpq":  # eight-bit codes; projection and centres in fp32
        dims, code, lists = ivfpq_layout(count, width, config)
        other = width * dims + lists * dims
        share = min(1.0, config.probes / lists)
        return Reads(count * code, count * code, share, 4.0 * other, other, query_bytes)
    itemsize = 2 if config.kind == "faiss-flat" else keys.itemsize
    return Reads(key_bytes=keys.numel() * itemsize, key_numbers=keys.numel())


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure what this machine can do; products in `dtype` on a GPU, in fp32 on a CPU."""
    size = _COPIED_BYTES.get(device.type, _COPIED_BYTES["cpu"])
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = quickest(lambda: target.copy_(source), device)
    rows = _SQUARE.get(device.type, _SQUARE["cpu"])
    held = dtype if device.type == "cuda" else torch.float32
    square = torch.ones(rows, rows, device=device, dtype=held)
    multiplying = quickest(lambda: square @ square, device)
    return Rates(2 * source.nbytes / copying, 2 * rows**3 / multiplying)


def machine_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU and how many cores it has."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or _processor()}, {os.cpu_count()} cores"


def _processor() -> str:
    """Return the CPU's name where Linux knows it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
