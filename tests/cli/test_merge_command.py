"""`knn-moe merge`: what it says it keeps and drops, and what it refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from helpers.commands import assert_refused, run_cli
from helpers.zoo import BUILD, TEXTS, family, make_texts
from knn_moe import BuildConfig, HeadConfig, RoutingMemory, build_memory
from knn_moe.memory.writer import reseal


@pytest.fixture
def other(zoo_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """A memory that is built as `saved_memory`, of other texts and one that it has as well."""
    texts = [*make_texts(3, seed=9), TEXTS[0]]
    config = BuildConfig(learning_rate=BUILD.learning_rate)
    build_memory(family("olmoe"), zoo_tokenizer, texts, config, folder=tmp_path / "other")
    return tmp_path / "other"


def merge(*arguments: object) -> str:
    """Merge and return what stderr says, as one line."""
    result = run_cli("merge", *arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    return " ".join(result.stderr.split())


def test_what_is_kept_is_said(saved_memory: Path, other: Path, tmp_path: Path) -> None:
    said = merge(saved_memory, other, "-o", tmp_path / "both")
    both = RoutingMemory.from_pretrained(tmp_path / "both")
    assert f"Kept: all {len(both):,} cases with their values" in said
    assert f"the settings of '{saved_memory}': preset paper, 1 step of 5 to build; K = 1" in said
    assert "1 examples are in more than one" in said
    assert "Computed again: the width (γ)" in said
    assert "Dropped" not in said
    assert "Warning" not in said


def test_what_is_dropped_is_said(saved_memory: Path, other: Path, tmp_path: Path) -> None:
    calibrated = shutil.copytree(other, tmp_path / "calibrated")
    opened = RoutingMemory.from_pretrained(calibrated)
    change = {"difference": -0.1, "low": -0.2, "high": -0.05}
    manifest = replace(
        opened.manifest,
        calibration={"helps": True, "change": change, "examples": 9},
        routing=replace(opened.routing, k=8, head=HeadConfig(), spare_first_token=True),
    )
    reseal(calibrated, manifest)
    said = merge(saved_memory, calibrated, "-o", tmp_path / "both")
    dropped = f"the calibration of '{calibrated}', and the language-model head of '{calibrated}'."
    assert f"Dropped: {dropped} Run knn-moe calibrate on the result." in said
    assert f"first tokens are left to the router, as in '{calibrated}'" in said
    assert "different settings" not in said  # those of a calibration are dropped
    both = RoutingMemory.from_pretrained(tmp_path / "both")
    assert (both.routing.k, both.routing.head) == (1, None)
    reseal(calibrated, replace(manifest, values_trained=True))
    said = merge(calibrated, saved_memory, "-o", tmp_path / "again")
    assert f"The values of '{calibrated}' stay as calibration trained them." in said
    assert "name a reference set of other examples" in said


@pytest.mark.filterwarnings("default:The memories have different settings")
def test_differing_settings_are_told(
    saved_memory: Path, zoo_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    large = replace(BUILD, steps=2, learning_rate=7.5)
    build_memory(family("olmoe"), zoo_tokenizer, TEXTS, large, folder=tmp_path / "large")
    result = run_cli("merge", saved_memory, tmp_path / "large", "-o", tmp_path / "m", "--json")
    facts: dict[str, Any] = json.loads(result.stdout)
    assert facts["cases"] == len(RoutingMemory.from_pretrained(tmp_path / "m"))
    assert facts["notes"][0].startswith("Kept: all")
    differing = f"steps 1 in '{saved_memory}', 2 in '{tmp_path / 'large'}'; learning_rate 5 in"
    assert f"Warning: The memories have different settings: {differing}" in result.stderr
    assert f"The merged memory has the settings of '{saved_memory}'." in result.stderr
    assert "batch_tokens" not in result.stderr
    assert RoutingMemory.from_pretrained(tmp_path / "m").build.learning_rate == 5


def test_a_memory_is_not_merged_with_itself(
    saved_memory: Path, other: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(saved_memory, tmp_path / "copy")
    link = tmp_path / "link"
    link.symlink_to(saved_memory)
    before = sorted(tmp_path.iterdir())
    for again in (saved_memory, copy, link, f"{saved_memory}/"):
        refused = run_cli("merge", saved_memory, other, again, "-o", tmp_path / "twice")
        assert_refused(refused, "are the same memory", "Name each memory once")
    assert sorted(tmp_path.iterdir()) == before
