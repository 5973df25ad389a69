"""experiments/self_labels.py: memories of true and of own labels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import self_labels


@pytest.mark.slow
def test_every_kind_of_label_is_measured(
    run_script: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GREEDY", "SAMPLED"):
        config = self_labels.replace(getattr(self_labels, name), max_new_tokens=4)
        monkeypatch.setattr(self_labels, name, config)
    options = ("--sequences", 2, "--windows", 1, "--domain", "sql")
    found = run_script(self_labels.main, tmp_path, *options)
    rows = {row["labels"]: row for row in found["rows"]}
    assert list(rows) == [
        "zero-shot",
        "true, own logits",
        "true",
        "greedy",
        "greedy, surest half",
        "sampled",
        "the prompts as text",
    ]
    assert {row["domain"] for row in rows.values()} == {"sql"}
    assert rows["true"]["cases"] == rows["true, own logits"]["cases"] > rows["greedy"]["cases"]
    assert rows["true"]["nll"] < rows["zero-shot"]["nll"]
    assert run_script(self_labels.main, tmp_path, *options) == found


def test_too_few_texts_are_refused(
    run_script: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="has 6 texts of at least 128 tokens, but 8 are needed"):
        run_script(self_labels.main, tmp_path, "--sequences", 4, "--windows", 1, "--domain", "sql")
