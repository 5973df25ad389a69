"""The script that measures a memory on text of other domains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import other_text
from corpus import read_texts
from knn_moe import build_memory


def test_a_wider_reach_has_more_confidence(
    small_data: Path, least_folder: Path, least_model: Any, tmp_path: Path
) -> None:
    texts = read_texts(small_data, "medical", "train")[:8]
    memory = build_memory(least_model, AutoTokenizer.from_pretrained(least_folder), texts)
    memory.save_pretrained(tmp_path / "memory")
    places = [least_folder, tmp_path / "memory", "--out", tmp_path / "rows.json"]
    options = ["--data", small_data, "--device", "cpu", "--windows", 2]
    domains = ["--domains", "medical", "fiction", "--factors", 0.25, 1]
    other_text.main([str(part) for part in (*places, *options, *domains)])
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf8"))
    for domain in ("medical", "fiction"):
        wide, own = (row for row in rows if row["domain"] == domain)
        assert (wide["factor"], own["factor"]) == (0.25, 1)
        assert 1 > wide["mean_confidence"] > own["mean_confidence"] > 0
        assert wide["nll_change"]["difference"] == pytest.approx(
            wide["nll"] - own["nll"] + own["nll_change"]["difference"], abs=2e-4
        )
