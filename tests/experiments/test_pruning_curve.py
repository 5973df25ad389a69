"""experiments/pruning_curve.py: pruned memories, their gains and the plot."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import pruning_curve
from knn_moe import RoutingMemory, calibrate
from knn_moe.config import CalibrationConfig
from pruning_curve import WAYS


@pytest.mark.slow
def test_every_way_to_prune_is_measured_and_plotted(
    run_script: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = CalibrationConfig(neighbours=(4,), value_rates=(0.1,), passes=1, steps=2)
    monkeypatch.setattr(pruning_curve, "calibrate", partial(calibrate, config=quick))
    memories, out = tmp_path / "memories", tmp_path / "out"
    sizes = ("--sequences", 4, "--windows", 1, "--shares", 0.5, "--memories", memories)
    found = run_script(pruning_curve.main, out, *sizes)
    whole = 4 * 256
    assert found["cases"] == whole
    rows = {(row["way"], row["keep"]): row for row in found["rows"]}
    shares = [(way, 0.5) for way in WAYS]
    assert list(rows) == [("whole", 1.0), *shares, ("calibrated", 1.0)]
    assert rows["whole", 1.0]["share_of_gain"] == 1
    assert {rows[key]["cases"] for key in shares} == {whole / 2}
    assert rows["calibrated", 1.0]["cases"] == whole
    folders = {path.name for path in memories.iterdir()}
    assert folders == {"least-4", "least-4-loss-0.5", "least-4-random-0.5", "least-4-chance-0.5"}
    plot = (out / "curve.svg").read_text()
    assert "least, 1,024 cases" in plot

    assert run_script(pruning_curve.main, out, *sizes) == found
    assert (out / "curve.svg").read_text() == plot


def test_a_random_quarter_is_part_of_the_random_half(
    zoo_memory: RoutingMemory, tmp_path: Path
) -> None:
    zoo_memory.save_pretrained(tmp_path / "whole")
    pruned = pruning_curve.PrunedMemories(None, tmp_path / "whole", 0)  # type: ignore[arg-type]
    half, quarter = (set(pruned.get("random", s).provenance.key.tolist()) for s in (0.5, 0.25))
    assert len(half) == round(0.5 * len(zoo_memory))
    assert quarter < half


def test_files_of_the_version_before_are_plotted(tmp_path: Path) -> None:
    rows = [
        {"way": way, "keep": keep, "share_of_gain": keep}
        for way, keep in (("whole", 1.0), ("values", 0.5), ("loss", 0.5))
    ]
    (tmp_path / "m.json").write_text(json.dumps({"model": "m", "cases": 9, "rows": rows}))
    pruning_curve.plot_curves(tmp_path)
    assert "m, 9 cases" in (tmp_path / "curve.svg").read_text()
