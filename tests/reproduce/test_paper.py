"""The paper's numbers are those that the paper prints."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from knn_moe.reproduce.catalogue import TABLES
from knn_moe.reproduce.paper import PAPER

TEX = Path(os.environ.get("KNN_MOE_DATA") or "../shared/data").parent / "paper.tex"
LABELS = {  # of these tables in the paper's source
    "main": "main_results", "perplexity": "why_works", "selective": "why_works2",
    "reference-size": "size", "neighbours": "k", "steps": "s", "construction-time": "mem_time",
    "inference-speed": "infer_speed", "memory-use": "vram", "c3po": "vs_c3po",
    "load-balancing": "lb", "similarity": "s_func_results", "top1-share": "top1_share",
    "seeds": "seed",
}  # fmt: skip


def test_every_table_has_the_papers_numbers() -> None:
    assert list(PAPER) == list(TABLES)
    for printed in PAPER.values():
        assert all(len(cells) == len(printed.columns) for cells in printed.rows)


@pytest.mark.skipif(not TEX.exists(), reason="the paper is not here")
@pytest.mark.parametrize("name", list(TABLES))
def test_the_papers_numbers_are_the_papers(name: str) -> None:
    """Row by row: the numbers of each of ours end a row of the paper's table."""
    text = TEX.read_text(encoding="utf8")
    end = text.index(rf"\label{{tab:{LABELS[name]}}}")
    table = text[text.rindex(r"\begin{tabular}", 0, end) : end]
    rows = [_numbers(line) for line in table.split(r"\\")]
    for cells in PAPER[name].rows:
        ours = _numbers(" ".join(cells))
        assert ours
        assert any(row[-len(ours) :] == ours for row in rows), cells
        marked = [cell.endswith("†") for cell in cells if _numbers(cell)]
        line = next(x for x in table.split(r"\\") if _numbers(x)[-len(ours) :] == ours)
        found = [("†" in part) for part in line.split("&") if _numbers(part)][-len(marked) :]
        assert marked == found, cells


def _numbers(text: str) -> list[str]:
    return re.findall(r"[+-]?\d+\.\d+", text.replace(r"$\pm$", " "))
