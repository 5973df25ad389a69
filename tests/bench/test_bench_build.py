"""`knn-moe bench build` on a tiny size: what it measures and shows."""

from __future__ import annotations

import json

import pytest

from helpers.commands import run_cli

WAYS = ["plain: one sequence at a time, eager", "model only", "end to end, memory on disk"]


@pytest.mark.slow
def test_every_way_to_build_is_measured() -> None:
    sizes = ["--sequences", "3", "--plain-sequences", "2", "--length", "8", "--grow", "4"]
    result = run_cli("bench", "build", "--device", "cpu", *sizes, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["way"] for row in rows] == [*WAYS, WAYS[-1]]
    assert [row["tokens"] for row in rows] == [16, 24, 24, 32]
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
    for row in rows[2:]:
        assert list(row["stages"]) == ["read", "optimise and write", "seal"]
        assert sum(row["stages"].values()) == pytest.approx(row["seconds"])
        assert all(seconds > 0 for seconds in row["stages"].values())
        assert row["disk_gb"] > 0
