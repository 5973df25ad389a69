"""What is published is what was measured: tables, cards and plot follow docs/measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

import measured_tables
import publish
from knn_moe.support.embedded_models import EMBEDDED_MODELS
from model_cards import gain_cell


def test_every_published_text_is_what_the_script_writes() -> None:
    written = dict(publish.published_texts())
    assert {path.name for path in written} >= {"README.md", "results.md"}
    for path, text in written.items():
        assert path.read_text(encoding="utf8") == text, f"{path} is out of date: run make publish"


def test_the_script_runs_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, markers in publish.REQUIRED.items():
        path = tmp_path / name if name == "README.md" else tmp_path / "docs" / name
        path.parent.mkdir(exist_ok=True)
        pairs = (f"<!-- {m}: experiments/publish.py -->\n<!-- /{m} -->\n" for m in markers)
        path.write_text("before\n" + "".join(pairs) + "after\n")
    assets = {name: tmp_path / name for name in EMBEDDED_MODELS}
    for folder in assets.values():
        folder.mkdir()
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    monkeypatch.setattr(publish, "embedded_model", assets.__getitem__)
    publish.main([])
    readme = (tmp_path / "README.md").read_text()
    assert measured_tables.gains_table() in readme
    assert measured_tables.costs_table() in readme
    assert readme.startswith("before\n")
    assert readme.endswith("after\n")
    assert measured_tables.measurements_table() in (tmp_path / "docs" / "results.md").read_text()
    for name, folder in assets.items():
        assert f"\n# {name}\n" in (folder / "README.md").read_text()
    plot = (tmp_path / "docs" / "growth.svg").read_text(encoding="utf8")
    assert plot.count("PolyCollection") == len(EMBEDDED_MODELS) + 1
    publish.main([])
    assert (tmp_path / "README.md").read_text() == readme


@pytest.mark.parametrize("text", ["no marker", "<!-- gains: experiments/publish.py -->"])
def test_a_missing_marker_is_named(text: str) -> None:
    with pytest.raises(SystemExit, match=r"README.md must have the markers <!-- gains: .*/gains"):
        publish.fill_markers(text, "README.md")
    assert publish.fill_markers("no marker", "other.md") == "no marker"


def test_the_gains_are_one_small_table() -> None:
    lines = measured_tables.gains_table().splitlines()
    assert len(lines) == 2 + 5
    assert lines[0].startswith("| smol-moe | SciQ % | ARC-Easy % |")
    assert lines[2].startswith("| zero-shot | 51.6 ± 3.7 | 47.4 ± 2.0 |")
    assert lines[3].startswith("| **kNN-MoE, calibrated** | 66.1 ± 3.5†* |")
    assert lines[3].endswith(" -0.400 ± 0.010†* |")
    assert lines[4].startswith("| **kNN-MoE, calibrated, with head** | - | - |")
    assert lines[5].startswith("| SFT, routers only | 66.0 ± 3.5†* |")


def test_a_table_of_the_study_leaves_out_rows_without_numbers() -> None:
    whole = measured_tables.read_measurement("pretrained/pretrained-text.json")["rows"]
    lines = measured_tables.pretrained_table("pretrained-text").splitlines()
    assert 5 < len(lines) - 2 < len(whole)
    assert "| smol-moe | SFT (Router Only) | -0.014 ± 0.003† |" in "\n".join(lines)


def test_the_costs_are_shares_of_the_model_without_a_memory() -> None:
    table = measured_tables.costs_table()
    assert "| decode, batch 1, compiled | 2.15 ms | +7.6 % | +331 % |" in table
    assert "| GPU memory | 13.9 GB | +5.5 % | +101 % |" in table


def test_a_cell_gives_the_change_its_margin_and_the_points() -> None:
    change = {"difference": -0.2, "low": -0.25, "high": -0.17, "p": 0.0002}
    row = {"nll": 3.0, "nll_change": change, "accuracy_change": {"difference": 0.031}}
    assert gain_cell(row) == "-0.200 ± 0.040 (+3.1)"
    assert gain_cell({"nll": 3.0}) == "3.000"
