"""The script that finds fragile layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fragile_layers


def test_it_measures_every_layer(
    small_data: Path, least_folder: Path, least_model: Any, tmp_path: Path
) -> None:
    out = tmp_path / "fragile.json"
    options = ["--data", small_data, "--device", "cpu", "--windows", 2, "--length", 16]
    fragile_layers.main([str(least_folder), "--out", str(out), *map(str, options)])
    alone, *rows = json.loads(out.read_text(encoding="utf8"))
    assert alone["loss"] > 0
    layers = [row["layer"] for row in rows if row["layer"] != "all"]
    assert layers == list(range(least_model.config.num_hidden_layers))
    whole = {(row["noise"], row["tokens"]): row["rise"] for row in rows if row["layer"] == "all"}
    assert set(whole) == {
        (size, tokens) for size in (0.1, 0.3, 1.0) for tokens in ("first", "other")
    }
    assert whole[1.0, "other"] != 0
