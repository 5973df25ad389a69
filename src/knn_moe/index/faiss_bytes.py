"""Read what FAISS wrote, before FAISS reads it: an index of the two kinds that are saved here.

FAISS's reader trusts the bytes: it may follow a length, open a file that they name, or return rows
that are not there. Here every length, row and number is compared with what it must be. The format
is that of faiss/impl/index_write.cpp: "IxSQ" for the flat index, "IwPQ" for IVFPQ.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
from torch import Tensor

from knn_moe.errors import MemoryFormatError

_L2: Final = 1  # FAISS's number of the metric
_FP16: Final = 4  # and of the quantiser
_CODES: Final = 256  # of eight bits
_HALF_LARGEST: Final = 0x7C00  # fp16 numbers with these bits of the exponent are not finite


class _Reader:
    """The bytes of an index, read from front to back."""

    def __init__(self, data: Tensor, where: str) -> None:
        self._data: Any = memoryview(data.contiguous().numpy().data).cast("B")
        self._place = 0
        self.where = where

    def refuse(self, reason: str) -> MemoryFormatError:
        return MemoryFormatError(f"{self.where} has a damaged FAISS index: {reason}.")

    def take(self, layout: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{layout}")
        if self._place + size > len(self._data):
            raise self.refuse("it ends too early")
        found = struct.unpack_from(f"<{layout}", self._data, self._place)
        self._place += size
        return found

    def expect(self, what: str, layout: str, *wanted: object) -> None:
        """Refuse numbers other than `wanted`."""
        if (found := self.take(layout)) != wanted:
            raise self.refuse(f"its {what} is {list(found)} instead of {list(wanted)}")

    def array(self, dtype: str, count: int) -> Any:
        size = np.dtype(dtype).itemsize * count
        if self._place + size > len(self._data):
            raise self.refuse("it ends too early")
        found = np.frombuffer(self._data, dtype, count, self._place)
        self._place += size
        return found

    def floats(self, what: str, count: int) -> None:
        """Skip `count` fp32 numbers, after their number; refuse any that is not finite."""
        self.expect(what, "Q", count)
        if not np.isfinite(self.array("<f4", count)).all():
            raise self.refuse(f"its {what} are not finite")

    def header(self, what: str, dims: int, cases: int) -> None:
        """Read what every index begins with: width, size, two numbers without use, metric."""
        self.expect(what, "iq", dims, cases)
        self.take("qq")
        self.expect(what, "Bi", 1, _L2)

    def end(self) -> None:
        if self._place != len(self._data):
            raise self.refuse("it has bytes behind its end")


def check_flat(data: Tensor, cases: int, width: int, where: str) -> None:
    """Check the bytes of a flat index in fp16 of `cases` keys. Shapes: data [n] uint8.

    Raises:
        MemoryFormatError: They are no such index.
    """
    read = _Reader(data, where)
    read.expect("kind", "4s", b"IxSQ")
    read.header("size", width, cases)
    read.expect("quantiser", "i", _FP16)
    read.take("if")  # of training, which fp16 does without
    read.expect("quantiser", "QQQ", width, 2 * width, 0)
    read.expect("length", "Q", 2 * width * cases)
    halves = read.array("<u2", width * cases)
    if len(halves) and int((halves & _HALF_LARGEST).max()) == _HALF_LARGEST:
        raise read.refuse("its keys are not finite")
    read.end()


def check_ivfpq(data: Tensor, cases: int, dims: int, where: str) -> None:
    """Check the bytes of an IVFPQ of `cases` keys of `dims` dimensions. Shapes: data [n] uint8.

    Raises:
        MemoryFormatError: They are no such index, or a list names a row that is not there.
    """
    read = _Reader(data, where)
    read.expect("kind", "4s", b"IwPQ")
    read.header("size", dims, cases)
    lists, _ = read.take("QQ")  # the second is how many lists are probed, which is set anew
    read.expect("quantiser", "4s", b"IxF2")
    read.header("quantiser", dims, lists)
    read.floats("centroids", lists * dims)
    read.expect("map", "BQ", 0, 0)  # none: rows are not looked up
    residual, size = read.take("BQ")
    if residual != 1 or not 1 <= size <= dims or dims % size:
        raise read.refuse(f"its codes of {size} bytes do not fit {dims} dimensions")
    read.expect("code", "QQQ", dims, size, 8)
    read.floats("code's centroids", dims * _CODES)
    read.expect("lists", "4sQQ", b"ilar", lists, size)
    rows = [_list_rows(read, length, size) for length in _list_lengths(read, lists)]
    read.end()
    found = np.sort(np.concatenate([np.empty(0, np.int64), *rows]))
    if not np.array_equal(found, np.arange(cases)):
        raise read.refuse(f"its lists do not hold each of its {cases:,} cases once")


def _list_lengths(read: _Reader, lists: int) -> list[int]:
    """Return the length of each list that is not empty, in the order of the lists."""
    (kind,) = read.take("4s")
    (count,) = read.take("Q")
    numbers = read.array("<u8", count)
    if kind == b"full" and count == lists:
        return [int(length) for length in numbers if length]
    places, lengths = numbers[::2], numbers[1::2]
    if kind != b"sprs" or count % 2 or (places >= lists).any() or (np.diff(places) <= 0).any():
        raise read.refuse("its lists have no lengths")
    return [int(length) for length in lengths]


def _list_rows(read: _Reader, length: int, size: int) -> Any:
    """Skip the codes of a list and return its rows."""
    read.array("u1", length * size)
    return read.array("<i8", length)
