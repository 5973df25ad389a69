"""experiments/compare_methods.py: `knn-moe eval` and `compare` of several models and tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import compare_methods
from compare_methods import choose_earlier_rows


@pytest.mark.slow
def test_methods_are_evaluated_and_compared(
    small_data: Path, least_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KNN_MOE_DATA", str(small_data))
    monkeypatch.setenv("PYTHONPATH", str(Path(compare_methods.__file__).parents[1] / "src"))
    out = tmp_path / "out"
    out.mkdir()
    path = out / "least-text_sql.json"
    path.write_text(json.dumps([{"method": "zero-shot", "nll": 1.0}, {"method": "sft", "nll": 2}]))
    places = (least_folder, "--runs", tmp_path / "runs", "--out", out, "--device", "cpu")
    work = ("--tasks", "text_sql", "--windows", 2, "--methods", "zero-shot", "knn-paper")
    compare_methods.main([str(part) for part in (*places, *work)])
    rows = json.loads(path.read_text())
    assert [row["method"] for row in rows] == ["zero-shot", "knn-paper"]  # another model's row went
    for row in rows:
        assert (row["model"], row["task"], row["device"]) == ("least", "text_sql", "CPU")
    assert rows[0]["nll_change"] is None
    assert rows[1]["nll_change"]["difference"] == pytest.approx(rows[1]["nll"] - rows[0]["nll"])


def test_rows_of_another_model_are_not_kept() -> None:
    before = [{"method": "zero-shot", "nll": 3.0}, {"method": "sft", "nll": 2.5}]
    now = [{"method": "zero-shot", "nll": 3.0}, {"method": "knn", "nll": 2.8}]
    assert choose_earlier_rows(before, now) == before[1:]
    now[0]["nll"] = 3.01
    assert choose_earlier_rows(before, now) == []
    assert choose_earlier_rows([], now) == choose_earlier_rows(before, now[1:]) == []
