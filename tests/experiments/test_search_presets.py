"""experiments/search_presets.py: one row for each way to build and recall."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import search_presets
from search_presets import RECALLS, BuildChoice


@pytest.mark.slow
def test_the_grid_is_written_and_a_stopped_run_continues(
    run_script: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_presets, "RECALLS", RECALLS[:1])
    options = ("--sequences", 2, "--windows", 1, "--only", "1,2,dense")
    first = run_script(search_presets.main, tmp_path, *options)
    assert (first["model"], first["sequences"], first["windows"]) == ("least", 2, 1)
    assert [row["domain"] for row in first["rows"]] == ["medical", "sql"]

    monkeypatch.setattr(search_presets, "RECALLS", RECALLS[:3])
    found = run_script(search_presets.main, tmp_path, *options)
    assert found["rows"][:2] == first["rows"]
    choices = [(row["domain"], row["k"], row["gamma_scale"]) for row in found["rows"][2:]]
    assert choices == [(d, r.k, r.gamma_scale) for d in ("medical", "sql") for r in RECALLS[1:3]]
    for row in found["rows"]:
        assert (row["steps"], row["learning_rate"], row["gradient"]) == (1, 2.0, "dense")
        assert row["nll_change"] != 0


def test_a_way_to_build_is_parsed() -> None:
    assert search_presets.parse_build("5,2,dense") == BuildChoice(5, 2.0, "dense")
