"""experiments/measure_presets.py: its table and its growth curve, on very little text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import measure_presets
from corpus import load_validation_windows
from expert_balance import losses_by_domain


@pytest.fixture(scope="module")
def measured(
    run_script: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("measurements") / "new"
    sizes = ("--sequences", 4, "--windows", 2, "--sizes", 4, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_presets, "DOMAINS", ("medical",))  # has enough texts to calibrate
        found = run_script(measure_presets.main, out, *sizes)
    assert [path.name for path in out.iterdir()] == ["least.json"]
    return found


@pytest.mark.slow
def test_a_measurement_says_what_was_measured(measured: dict[str, Any]) -> None:
    assert measured.keys() == {"model", "sequences", "device", "table", "growth"}
    assert (measured["model"], measured["sequences"], measured["device"]) == ("least", 4, "CPU")
    assert [(row["domain"], row["way"]) for row in measured["table"]] == [
        ("medical", way) for way in ("zero-shot", "paper", "calibrated", "shuffled")
    ]
    assert [(row["sequences"], row["way"]) for row in measured["growth"]] == [
        (4, "paper"),
        (4, "calibrated"),
        (5, "paper"),
        (5, "calibrated"),
    ]


def test_changes_are_against_zero_shot(measured: dict[str, Any]) -> None:
    zero_shot = {row["domain"]: row for row in measured["table"] if row["way"] == "zero-shot"}
    for row in (*measured["table"], *measured["growth"]):
        base = zero_shot[row.get("domain", "medical")]
        if row is base:
            assert row.keys() == {"domain", "way", "nll", "accuracy"}
            continue
        for name in ("nll", "accuracy"):
            change = row[f"{name}_change"]
            assert change.keys() == {"difference", "low", "high", "p"}
            assert change["difference"] == pytest.approx(row[name] - base[name], abs=2e-4)
            assert change["low"] <= change["difference"] <= change["high"]


def test_zero_shot_is_the_loss_of_the_model(
    measured: dict[str, Any], least_model: Any, small_tokenizer: Any, small_data: Path
) -> None:
    tokens = {
        domain: part[:2]
        for domain, part in load_validation_windows(
            small_tokenizer, small_data, ("medical",)
        ).items()
    }
    loss = losses_by_domain(least_model, tokens)["medical"]
    assert measured["table"][0]["nll"] == pytest.approx(loss, abs=2e-4)


def test_the_calibrated_memory_helps_and_the_control_does_not(measured: dict[str, Any]) -> None:
    """The reference text is much like the test text."""
    ways = {row["way"]: row["nll"] for row in measured["table"]}
    assert ways["calibrated"] < ways["zero-shot"] - 0.05
    assert ways["calibrated"] < ways["shuffled"] - 0.05
