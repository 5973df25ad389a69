"""What is published is what was measured: cards and the README's table follow the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

import calibrated
import publish
from knn_moe.support.embedded_models import EMBEDDED_MODELS, embedded_model


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_a_card_says_what_was_measured(name: str) -> None:
    card = Path(embedded_model(name), "README.md").read_text(encoding="utf8")
    assert card == publish.model_card(name)


def test_the_readme_table_says_what_was_measured() -> None:
    readme = (publish.ROOT / "README.md").read_text(encoding="utf8")
    assert readme == publish.replace_between(readme, publish.readme_table())


def test_a_cell_gives_the_change_its_margin_and_the_points() -> None:
    change = {"difference": -0.2, "low": -0.25, "high": -0.17, "p": 0.0002}
    row = {"nll": 3.0, "nll_change": change, "accuracy_change": {"difference": 0.031}}
    assert publish.change_cell(row) == "-0.200 ± 0.040 (+3.1)"
    assert publish.change_cell({"nll": 3.0}) == "3.000"


def test_the_plot_is_drawn_from_every_model(tmp_path: Path) -> None:
    publish.plot_growth(tmp_path / "growth.svg")
    drawn = (tmp_path / "growth.svg").read_text(encoding="utf8")
    assert drawn.count("PolyCollection") == len(EMBEDDED_MODELS) + 1


def test_rows_of_another_model_are_not_kept() -> None:
    before = [{"method": "zero-shot", "nll": 3.0}, {"method": "sft", "nll": 2.5}]
    now = [{"method": "zero-shot", "nll": 3.0}, {"method": "knn", "nll": 2.8}]
    assert calibrated.still_true(before, now) == before[1:]
    now[0]["nll"] = 3.01
    assert calibrated.still_true(before, now) == []
    assert calibrated.still_true([], now) == calibrated.still_true(before, now[1:]) == []
