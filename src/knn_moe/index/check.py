"""Whether saved tensors are what they are said to be: their form, and what is in them.

A file that is whole may still lie. Kernels read the places that an index names, so every place is
checked before anything is searched. `check_form` reads no numbers, only dtypes and shapes;
`check_contents` reads all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import torch
from torch import Tensor

from knn_moe.config import DIMS_STEP, IndexConfig
from knn_moe.errors import MemoryFormatError
from knn_moe.index.faiss_bytes import check_flat, check_ivfpq
from knn_moe.index.fast.grid import FARTHEST
from knn_moe.index.fast.partition import LONGEST

LARGEST: Final = 1e15  # of any number: far beyond models, and its square still fits in fp32
_SMALLEST: Final = 1e-15  # of a scale
_LARGEST_SCALE: Final = 2.0**100  # that index/faiss.py gives to small keys
FLOATS: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_FP32: Final = (torch.float32,)

# The dtypes that a tensor may have, and its shape.
Form: TypeAlias = tuple[tuple[torch.dtype, ...], tuple[int, ...]]


def check_tensors(tensors: Mapping[str, Tensor], forms: Mapping[str, Form], where: str) -> None:
    """Raise MemoryFormatError if `tensors` are not exactly those of `forms`."""
    if missing := sorted(forms.keys() - tensors.keys()):
        raise MemoryFormatError(f"{where} lacks {', '.join(missing)}. Build it again.")
    if unknown := sorted(tensors.keys() - forms.keys()):
        raise MemoryFormatError(f"{where} has an unknown tensor {unknown[0]!a}.")
    for name, (dtypes, shape) in forms.items():
        tensor = tensors[name]
        if tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
            raise MemoryFormatError(
                f"{where} has {name} as {_show(tensor.dtype)} {list(tensor.shape)} instead of "
                f"{' or '.join(map(_show, dtypes))} {list(shape)}."
            )


def check_numbers(tensor: Tensor, name: str, where: str, least: float = -LARGEST) -> None:
    """Raise MemoryFormatError if a number is not finite, below `least` or beyond LARGEST."""
    check_range(tensor, name, where, least, LARGEST)


def check_range(tensor: Tensor, name: str, where: str, least: float, most: float) -> None:
    """Raise MemoryFormatError unless all numbers are from `least` to `most`; NaN is not."""
    if not tensor.numel():
        return
    low, high = (float(end) for end in torch.aminmax(tensor.reshape(-1)))
    if not (least <= low and high <= most):
        raise MemoryFormatError(
            f"{where} holds numbers from {low:g} to {high:g} in its {name}; they must be finite "
            f"and from {least:g} to {most:g}."
        )


def check_form(
    tensors: Mapping[str, Tensor], config: IndexConfig, cases: int, width: int, where: str
) -> None:
    """Check the dtypes and shapes of an index's tensors.

    Args:
        tensors: As `KeyIndex.tensors` names them.
        config: The index that they are said to be.
        cases: How many keys it must hold.
        width: The width of keys and queries.
        where: What is checked, for messages.

    Raises:
        MemoryFormatError: A tensor is missing, unknown, or of another dtype or shape.
    """
    dims = 0
    if config.kind == "fast":
        dims, forms = _fast_form(tensors, config, cases, width)
    elif config.kind == "exact":
        forms = {"keys": (FLOATS, (cases, width))}
    else:
        forms = _faiss_form(tensors, config, cases, width)
    check_tensors(tensors, forms, where)
    if dims % DIMS_STEP:
        raise MemoryFormatError(f"{where} has {dims} dimensions, not a multiple of {DIMS_STEP}.")


def _fast_form(
    tensors: Mapping[str, Tensor], config: IndexConfig, cases: int, width: int
) -> tuple[int, dict[str, Form]]:
    dims, lists = _rows(tensors, "projection"), max(_rows(tensors, "centres"), 1)
    four = config.bits == 4
    forms: dict[str, Form] = {
        "projection": (FLOATS, (dims, width)),
        "offset": (_FP32, (dims,)),
        "centre": (_FP32, (width,)),
        "step": (_FP32, ()),
        "codes": ((torch.uint8,), (cases, dims // 2)) if four else ((torch.int8,), (cases, dims)),
        "norms": ((torch.int32,), (cases,)),
        "dropped": ((torch.float16,), (cases,)),
        "centres": ((torch.int8,), (lists, dims)),
        "begin": ((torch.int32,), (lists + 1,)),
        "rows": ((torch.int32,), (cases,)),
        "correction": (_FP32, (4,)),
    }
    return dims, forms | _reranked(config, cases, width)


def _faiss_form(
    tensors: Mapping[str, Tensor], config: IndexConfig, cases: int, width: int
) -> dict[str, Form]:
    forms: dict[str, Form] = {
        "faiss": ((torch.uint8,), (_rows(tensors, "faiss"),)),
        "centre": (_FP32, (width,)),
        "scale": (_FP32, ()),
    }
    if config.kind == "faiss-flat":
        return forms
    projected = tensors.get("projection", torch.empty(0))
    dims = projected.shape[-1] if projected.ndim else 0
    forms |= {
        "projection": (_FP32, (width, dims)),
        "residuals": (_FP32, (cases,)),
        "correction": (_FP32, (4,)),
    }
    return forms | _reranked(config, cases, width)


def _reranked(config: IndexConfig, cases: int, width: int) -> dict[str, Form]:
    return {"keys": (FLOATS, (cases, width))} if config.rerank else {}


def check_contents(
    tensors: Mapping[str, Tensor], config: IndexConfig, cases: int, where: str
) -> None:
    """Check the numbers of an index of `cases` keys whose form was checked.

    Raises:
        MemoryFormatError: A number is not finite, or names a place that is not there.
    """
    for name in tensors.keys() & {"keys", "projection", "offset", "centre", "correction"}:
        check_numbers(tensors[name], name, where)
    if config.kind == "fast":
        _check_fast(tensors, where)
    elif config.kind == "faiss-flat":
        check_range(tensors["scale"], "scale", where, _SMALLEST, _LARGEST_SCALE)
        check_flat(tensors["faiss"], cases, len(tensors["centre"]), where)
    elif config.kind == "ivfpq":
        check_range(tensors["scale"], "scale", where, _SMALLEST, _LARGEST_SCALE)
        check_numbers(tensors["residuals"], "residuals", where, least=0.0)
        check_ivfpq(tensors["faiss"], cases, tensors["projection"].shape[1], where)


def check_values(
    tensors: Mapping[str, Tensor], config: IndexConfig, shape: tuple[int, int], where: str
) -> None:
    """Check the form of a compressed layer's values. `shape` is [cases, experts].

    Raises:
        MemoryFormatError: A tensor is missing, unknown, or of another dtype or shape.
    """
    cases, experts = shape
    if config.kind != "fast":
        check_tensors(tensors, {"values": (_FP32, shape)}, where)
        return
    four = config.value_bits == 4
    packed = (cases, (experts + 1) // 2) if four else shape
    check_tensors(
        tensors,
        {
            "codes": ((torch.uint8 if four else torch.int8,), packed),
            "steps": ((torch.float16,), (cases,)),
            "centre": (_FP32, (experts,)),
        },
        where,
    )


def check_value_numbers(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise MemoryFormatError if numbers of values, full or packed, are not finite."""
    for name in tensors.keys() & {"values", "steps", "centre"}:
        check_numbers(tensors[name], name, where)


def _check_fast(tensors: Mapping[str, Tensor], where: str) -> None:
    cases, begin = len(tensors["rows"]), tensors["begin"]
    check_range(tensors["step"], "step", where, _SMALLEST, LARGEST)
    check_numbers(tensors["dropped"], "dropped", where, least=0.0)
    check_range(tensors["norms"], "norms", where, 0, FARTHEST)
    check_range(begin, "begin", where, 0, cases)
    check_range(begin.diff(), "lists' lengths", where, 0, LONGEST)
    if (int(begin[0]), int(begin[-1])) != (0, cases):
        raise MemoryFormatError(f"{where} has lists that do not begin and end with its cases.")
    check_permutation(tensors["rows"], "rows", where)


def check_permutation(numbers: Tensor, name: str, where: str) -> None:
    """Raise MemoryFormatError unless `numbers` [n] are 0 to n - 1 in some order."""
    check_range(numbers, name, where, 0, len(numbers) - 1)
    if len(numbers) and int(torch.bincount(numbers).amax()) > 1:
        raise MemoryFormatError(f"{where} names a case twice in its {name}.")


def _rows(tensors: Mapping[str, Tensor], name: str) -> int:
    """Return the length of a tensor that decides others' shapes; 0 if it has none."""
    tensor = tensors.get(name, torch.empty(0))
    return len(tensor) if tensor.ndim else 0


def _show(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
