"""The machine a benchmark runs on, and the least time that a search could take there.

Knows what each index must read and multiply at the least; nothing of how it is timed.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from knn_moe.index import FastIndex, IndexConfig, KeyIndex
from knn_moe.index.faiss import ivfpq_layout
from knn_moe.index.fast.index import candidates

_COPIED: Final = {"cuda": 1 << 31, "cpu": 1 << 28}  # bytes: more than a cache holds
_SQUARE: Final = {"cuda": 8192, "cpu": 2048}  # rows of the matrices multiplied
_TRIES: Final = 3  # at the least
_SECONDS: Final = 0.5  # of tries


class Rates(NamedTuple):
    """What a machine was seen to do at its best: a large copy, a large matrix product."""

    bytes_per_second: float  # read and written
    operations_per_second: float  # additions and multiplications


class Reads(NamedTuple):
    """What a search reads: numbers are multiplied, once for each query that meets them."""

    key_bytes: float  # codes of all keys
    key_numbers: float
    share: float = 1.0  # of the keys' lists, that one query looks into
    other_bytes: float = 0.0  # for every query alike: projection and centres
    other_numbers: float = 0.0
    query_bytes: float = 0.0  # for a query alone: the keys it ranks again


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


def floor_seconds(reads: Reads, batch: int, rates: Rates) -> Floor:
    """The least time of a search for `batch` queries, at the rates this machine was seen to reach.

    Bytes: each is read once, however many queries want it. Queries look into lists at random, so
    that 1 - (1 - share)^batch of the codes are met, which is all of them for many queries.
    Arithmetic: a multiplication and an addition for each number that a query meets. Not counted:
    launches, choosing the nearest, values and mixing. Codes that stay in a cache beat this floor.
    """
    met = 1 - (1 - reads.share) ** batch
    read = reads.other_bytes + met * reads.key_bytes + batch * reads.query_bytes
    numbers = reads.other_numbers + reads.share * reads.key_numbers
    return Floor(read / rates.bytes_per_second, 2 * batch * numbers / rates.operations_per_second)


def reads_of(index: KeyIndex, config: IndexConfig, keys: Tensor, k: int) -> Reads:
    """The fewest bytes that an index of these keys [M, d] reads for the k nearest."""
    again = min(candidates(k), len(keys)) if config.rerank else 0
    ranked = float(again * keys.shape[1] * keys.itemsize)
    if isinstance(index, FastIndex):
        rows, dims = index.centres.shape
        return Reads(
            key_bytes=index.codes.nbytes + index.norms.nbytes,
            key_numbers=len(keys) * dims,
            share=index.probes / rows,
            other_bytes=index.projection.nbytes + index.centres.nbytes,
            other_numbers=index.projection.numel() + index.centres.numel(),
            query_bytes=ranked,
        )
    if config.kind == "ivfpq":
        return _reads_of_ivfpq(config, keys)._replace(query_bytes=ranked)
    itemsize = 2 if config.kind == "faiss-flat" else keys.itemsize
    return Reads(key_bytes=keys.numel() * itemsize, key_numbers=keys.numel())


def _reads_of_ivfpq(config: IndexConfig, keys: Tensor) -> Reads:
    """Eight-bit codes, of runs of dims; projection and centres in fp32."""
    count, width = keys.shape
    dims, code, lists = ivfpq_layout(count, width, config)
    other = width * dims + lists * dims
    share = min(1.0, config.probes / lists)
    return Reads(count * code, count * code, share, 4.0 * other, other)


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The best of a few tries. Products are in the keys' dtype on a GPU, on a CPU in fp32."""
    return Rates(_copied(device), _multiplied(device, dtype))


def _copied(device: torch.device) -> float:
    source = torch.ones(_at(_COPIED, device), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _quickest(lambda: target.copy_(source), device)


def _multiplied(device: torch.device, dtype: torch.dtype) -> float:
    rows = _at(_SQUARE, device)
    kept = dtype if device.type == "cuda" else torch.float32
    square = torch.ones(rows, rows, device=device, dtype=kept)
    return 2 * rows**3 / _quickest(lambda: square @ square, device)


def _at(sizes: Mapping[str, int], device: torch.device) -> int:
    return sizes.get(device.type, sizes["cpu"])


def _quickest(work: Callable[[], Any], device: torch.device) -> float:
    spent: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(spent) < _TRIES or time.perf_counter() < end:
        wait(device)
        started = time.perf_counter()
        work()
        wait(device)
        spent.append(time.perf_counter() - started)
    return min(spent)


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or _processor()}, {os.cpu_count()} cores"


def _processor() -> str:
    """Its name where Linux tells it, else its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
