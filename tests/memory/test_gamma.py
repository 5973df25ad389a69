"""γ against a plain loop over pairs in float64."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from knn_moe.index import exact, leave_one_out
from knn_moe.memory import gamma
from knn_moe.memory.gamma import estimate_gamma


def loop_gamma(
    keys: Tensor, example: Tensor, case: Tensor, rows: Iterable[int] | None = None
) -> float:
    squared = (keys.double()[:, None] - keys.double()).square().sum(dim=-1).tolist()
    owner = list(range(len(keys))) if len(set(example.tolist())) == 1 else example.tolist()
    same = case.tolist()
    nearest = []
    for i in range(len(keys)) if rows is None else rows:
        others = [
            squared[i][j]
            for j in range(len(keys))
            if owner[i] != owner[j] and same[i] != same[j] and squared[i][j] > 0
        ]
        nearest.extend([min(others)] if others else [])
    return len(nearest) / sum(nearest) if nearest else 1.0


def line(*places: float) -> Tensor:
    return torch.tensor(places)[:, None]


def random_memory(
    count: int = 48, width: int = 6, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Three keys an example; the first of each is one shared case, the template's."""
    keys = torch.randn(count, width)
    keys[::3] = keys[0]
    case = torch.arange(count)
    case[::3] = 0
    return keys + offset, torch.arange(count) // 3, case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("offset", [0.0, 3.0, -30.0])
def test_gamma_as_by_the_loop(dtype: torch.dtype, offset: float) -> None:
    keys, example, case = random_memory(offset=offset)
    keys = keys.to(dtype)
    assert estimate_gamma(keys, example, case) == pytest.approx(
        loop_gamma(keys, example, case), rel=1e-5
    )


def test_a_large_common_offset_does_not_cancel() -> None:
    keys, example, case = random_memory(offset=1000.0)
    assert estimate_gamma(keys, example, case) == pytest.approx(
        loop_gamma(keys, example, case), rel=1e-3
    )


def test_keys_of_the_same_example_do_not_count() -> None:
    keys, example = line(0, 1, 10, 11), torch.tensor([0, 0, 1, 1])
    assert estimate_gamma(keys, example, torch.arange(4)) == pytest.approx(
        4 / (100 + 81 + 81 + 100)
    )


def test_keys_of_the_same_case_do_not_count() -> None:
    keys, case = line(0, 1, 5), torch.tensor([7, 7, 9])
    assert estimate_gamma(keys, torch.arange(3), case) == pytest.approx(3 / (25 + 16 + 16))


@pytest.mark.parametrize("offset", [0, 50])
def test_zero_distances_do_not_count(offset: int) -> None:
    keys = line(0, 0, 3) + offset
    assert estimate_gamma(keys, torch.arange(3), torch.arange(3)) == pytest.approx(1 / 9)


def test_a_key_with_no_other_to_compare_is_left_out() -> None:
    keys, example, case = line(0, 4, 6), torch.tensor([0, 1, 1]), torch.tensor([1, 1, 2])
    assert estimate_gamma(keys, example, case) == pytest.approx(1 / 36)


def test_with_one_example_its_own_keys_count() -> None:
    keys, case = line(0, 1, 5), torch.tensor([7, 7, 9])
    one_example = torch.full((3,), 4)
    assert estimate_gamma(keys, one_example, torch.arange(3)) == pytest.approx(3 / (1 + 1 + 16))
    assert estimate_gamma(keys, one_example, case) == pytest.approx(3 / (25 + 16 + 16))


@pytest.mark.parametrize(
    "keys", [line(3), line(2, 2, 2), torch.zeros(4, 5), 1e3 + torch.zeros(3, 7)], ids=len
)
def test_without_two_keys_that_differ_gamma_is_one(keys: Tensor) -> None:
    assert estimate_gamma(keys, torch.arange(len(keys)), torch.arange(len(keys))) == 1.0


def test_gamma_is_one_where_every_pair_is_one_case() -> None:
    assert estimate_gamma(line(0, 1), torch.arange(2), torch.zeros(2)) == 1.0


@pytest.mark.parametrize("count", [50, 51, 64])
def test_a_sample_is_evenly_spaced(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gamma, "_SAMPLE", 8)
    keys, example, case = random_memory(count)
    rows = [place * count // 8 for place in range(8)]
    assert estimate_gamma(keys, example, case) == pytest.approx(
        loop_gamma(keys, example, case, rows), rel=1e-5
    )


def test_a_sample_stands_for_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, example, case = random_memory(600)
    everything = estimate_gamma(keys, example, case)
    monkeypatch.setattr(gamma, "_SAMPLE", 100)
    assert estimate_gamma(keys, example, case) == pytest.approx(everything, rel=0.2)


@pytest.mark.parametrize("size", [1, 5, 20])
def test_blocks_change_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, example, case = random_memory()
    whole = estimate_gamma(keys, example, case)
    monkeypatch.setitem(exact._KEYS, "cpu", size)
    assert len(list(exact.row_blocks(48, keys.device))) > 2
    assert estimate_gamma(keys, example, case) == pytest.approx(whole, rel=1e-6)


def test_device_may_be_named() -> None:
    keys, example, case = random_memory()
    on_cpu = estimate_gamma(keys, example, case, torch.device("cpu"))
    assert on_cpu == estimate_gamma(keys, example, case)


def twice(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every key under two examples that are not one case."""
    keys = torch.cat([keys, keys])
    return keys, torch.arange(len(keys)) // 4, torch.arange(len(keys))


def test_zero_distances_do_not_count_under_a_large_offset() -> None:
    keys, example, case = twice(100 + torch.randn(40, 16))
    assert estimate_gamma(keys, example, case) == pytest.approx(
        loop_gamma(keys, example, case), rel=1e-3
    )


def test_zero_distances_do_not_count_when_multiplied_in_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        leave_one_out, "dot_products", lambda x, keys: x.bfloat16().float() @ keys.float().T
    )
    keys, example, case = twice(torch.randn(40, 256).bfloat16())
    assert estimate_gamma(keys, example, case) == pytest.approx(
        loop_gamma(keys, example, case), rel=1e-3
    )
