"""Runs on disk: what cannot be read is named. test_evaluate.py writes and resumes them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from knn_moe.errors import RunError
from knn_moe.evaluation.store import RunFolder, find_finished_run, read_asked, read_run, read_runs
from knn_moe.tasks.sample import Asked, Sample

FACTS = {"task": "quiz", "method": "knn", "batches": [2, 1], "settings": {"scoring": None}}
SAMPLES = [Sample(id=str(number), prompt="p", score=1.0, batch=number // 2) for number in range(3)]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, "There are no runs in"),
        ("{", "There is no run in"),
        ('{"format": 99}', "has format 99; this version reads format 1"),
    ],
)
def test_folders_without_a_readable_run_are_refused(
    text: str | None, error: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text, encoding="utf8")
    with pytest.raises(RunError, match=error):
        read_runs(tmp_path)


def test_a_run_is_found_once_it_is_finished_and_only_with_the_same_facts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert find_finished_run(folder.path, FACTS) is None
    assert folder.begin(FACTS, resume=False, overwrite=False) == []
    folder.append(SAMPLES)
    assert find_finished_run(folder.path, FACTS) is None
    folder.finish(1.0, {})
    run = find_finished_run(folder.path, FACTS)
    assert run is not None
    assert run.samples == SAMPLES
    assert find_finished_run(folder.path, {"settings": {"scoring": "text"}}) is None


def test_questions_are_read_back_and_a_run_without_them_is_read_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.begin(FACTS, resume=False, overwrite=False)
    assert read_asked(read_run(folder.path)) == {}
    asked = [Asked("1", "Is it “é”?\nAnswer:", (" yes", " no")), Asked("2", "Why?")]
    folder.write_asked(asked)
    assert list(read_asked(read_run(folder.path)).values()) == asked
    (folder.path / "asked.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "whose?"}\n'))
    with pytest.raises(RunError, match=r"Line 1 of .*asked.jsonl.gz' is no question"):
        read_asked(read_run(folder.path))


def test_a_run_of_the_version_before_has_the_current_names(tmp_path: Path) -> None:
    old = {"k": 1, "trust": 0.5, "kernels": [{"layer": 0, "trust": 1.0}], "drawn": None}
    new = {"k": 1, "confidence_factor": 0.5, "per_layer": [{"layer": 0, "confidence_factor": 1.0}]}
    RunFolder(tmp_path).begin(
        {**FACTS, "method_facts": {"routing": old}}, resume=False, overwrite=False
    )
    facts = {**FACTS, "method_facts": {"routing": new}}
    assert RunFolder(tmp_path).begin(facts, resume=True, overwrite=False) == []


def test_incomplete_batches_are_dropped_and_malformed_lines_end_a_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.begin(FACTS, resume=False, overwrite=False)
    folder.append(SAMPLES[1:])
    assert read_run(folder.path).samples == SAMPLES[2:]
    with (folder.path / "samples.jsonl").open("a", encoding="utf8") as file:
        file.write(json.dumps({"id": "3", "colour": "red"}) + "\n" + "\0" * 9 + "\n")
    assert folder.begin(FACTS, resume=True, overwrite=False) == SAMPLES[2:]
    folder.append(SAMPLES[:2])
    folder.finish(1.0, {})
    with (folder.path / "samples.jsonl").open("a", encoding="utf8") as file:
        file.write(json.dumps({"id": "3", "colour": "red"}) + "\n")
    with pytest.raises(RunError, match="is not a sample"):
        read_run(folder.path)


def test_a_run_is_described_after_its_samples_are_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.begin(FACTS, resume=False, overwrite=False)
    folder.append(SAMPLES)
    folder.finish(1.0, {})

    def die(path: Path, text: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("knn_moe.evaluation.store.write_whole", die)
        with pytest.raises(KeyboardInterrupt):
            folder.begin(FACTS, resume=False, overwrite=True)
    assert folder.begin(FACTS, resume=True, overwrite=False) == []
    assert read_run(folder.path).samples == []
