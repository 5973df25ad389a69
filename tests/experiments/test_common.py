"""experiments/common.py: comparisons, and files of rows that a stopped run continues."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from common import MeasurementFile, compare_losses
from knn_moe.tasks.likelihood import TokenLosses
from measured_tables import MEASUREMENTS


def test_a_comparison_has_means_and_paired_changes() -> None:
    base = TokenLosses(torch.full((4, 3), 2.0), torch.zeros(4, 3, dtype=torch.bool))
    better = TokenLosses(torch.full((4, 3), 1.5), torch.ones(4, 3, dtype=torch.bool))
    assert compare_losses(base) == {"nll": 2.0, "accuracy": 0.0}
    row = compare_losses(better, base)
    assert (row["nll"], row["accuracy"]) == (1.5, 1.0)
    assert row["nll_change"]["difference"] == row["nll_change"]["low"] == -0.5
    assert row["accuracy_change"]["difference"] == 1.0


def test_a_file_keeps_its_rows_only_for_the_same_facts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "model.json"
    file = MeasurementFile(path, {"model": "m", "windows": 2})
    file.add({"way": "γ", "nll": 1.0})
    assert capsys.readouterr().out == "model {'way': 'γ', 'nll': 1.0}\n"
    assert json.loads(path.read_text()) == {"model": "m", "windows": 2, "rows": file.rows}
    again = MeasurementFile(path, {"model": "m", "windows": 2, "device": "a fact not in the file"})
    assert again.has(way="γ")
    assert not again.has(way="γ", nll=2.0)
    assert not MeasurementFile(path, {"model": "m", "windows": 3}).rows


def test_files_of_the_version_before_are_continued() -> None:
    labels = MEASUREMENTS / "labels" / "tiny-olmoe.json"
    facts = {"model": "tiny-olmoe", "sequences": 64, "windows": 32, "device": "CPU"}
    assert MeasurementFile(labels, facts).has(domain="sql", labels="true")
    presets = MEASUREMENTS / "presets-small" / "tiny-olmoe.json"  # a plain list of rows
    assert MeasurementFile(presets, facts).has(domain="sql", k=16, confidence_scale=0.2)
