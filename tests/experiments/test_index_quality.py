"""experiments/index_quality.py: every index beside the exact search."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import index_quality


@pytest.mark.slow
def test_every_index_is_compared_with_the_exact_search(
    run_script: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    ranked_again = "fast, 64 dims, ranked again"
    sizes = ("--sequences", 2, "--windows", 2, "--ways", index_quality.LARGE)
    found = run_script(index_quality.main, tmp_path, *sizes, "--indexes", "fast", ranked_again)
    exact, fast, _ = found["rows"]
    assert [row["index"] for row in found["rows"]] == ["exact", "fast", ranked_again]
    assert (exact["share_of_gain"], exact["recall"], exact["confidence_error"]) == (1, 1, 0)
    assert fast["share_of_gain"] == pytest.approx(1, abs=0.2)
    assert 0.5 < fast["recall"] <= 1
    assert 0 < fast["confidence_error"] < 0.1
