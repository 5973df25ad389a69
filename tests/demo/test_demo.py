"""A whole small demo: its memories, runs, passages and report."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers.html_page import Page, assert_self_contained
from helpers.tiny import trained
from knn_moe import RoutingMemory, attach
from knn_moe.config import CalibrationConfig
from knn_moe.demo.demo import CALIBRATED, CONTROL, PAPER, DemoConfig, render_demo, run_demo
from knn_moe.demo.texts import DemoText, load_documentation, make_task, sample_reference
from knn_moe.errors import CalibrationError, TaskDataError
from knn_moe.evaluation.compare import compare_runs
from knn_moe.evaluation.evaluate import EvalConfig, prepare_questions
from knn_moe.evaluation.store import read_runs
from knn_moe.reference.examples import Example, tokenise
from knn_moe.support.progress import Progress
from knn_moe.tasks.likelihood import token_losses

DOCUMENTATION = load_documentation()
WHOLE = [one.completion for one in DOCUMENTATION.reference]
PIECES = [Example.of(text[len(text) // 2 :][:300]) for text in WHOLE]
TEXT = replace(DOCUMENTATION, reference=PIECES)  # short texts, to calibrate quickly
CONFIG = DemoConfig(length=128, reference_tokens=4000, windows=7)
QUICK = CalibrationConfig(neighbours=(8,), value_rates=(0.03,), passes=1)


@pytest.fixture(scope="module")
def windows(tiny_tokenizer: Any) -> torch.Tensor:
    config = EvalConfig(limit=CONFIG.windows, length=CONFIG.length)
    questions = prepare_questions(tiny_tokenizer, make_task(TEXT, tiny_tokenizer), config).questions
    return torch.tensor([question.ids for question in questions])


@pytest.fixture(scope="module")
def demo(
    tiny_olmoe: PreTrainedModel,
    tiny_tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """A demo that has run: its result, its folder, and the progress it reported."""
    folder = tmp_path_factory.mktemp("demo")
    reports: list[Progress] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("knn_moe.demo.demo.CALIBRATION", QUICK)
        result = run_demo(tiny_olmoe, tiny_tokenizer, TEXT, CONFIG, folder, reports.append)
    return SimpleNamespace(result=result, folder=folder, reports=reports)


@pytest.mark.slow
def test_every_stage_reports_its_progress(demo: Any) -> None:
    stages: dict[str, list[Progress]] = {}
    for report in demo.reports:
        stages.setdefault(report.stage, []).append(report)
    assert len(stages) >= 9
    for stage, reports in stages.items():
        done = [report.done for report in reports]
        assert done == sorted(done)
        # The fits of a calibration count towards one total, and end when no more of them helps.
        assert done[-1] == reports[-1].total or "widths" in stage or "values" in stage


@pytest.mark.slow
def test_the_memories_are_the_papers_and_a_calibrated_one(demo: Any, tiny_tokenizer: Any) -> None:
    assert sorted(path.name for path in demo.folder.iterdir()) == ["calibrated", "paper", "runs"]
    sample = sample_reference(TEXT.reference, tiny_tokenizer, CONFIG.reference_tokens)
    tokens = sum(len(tokenise(piece, tiny_tokenizer).ids) for piece in sample)
    assert demo.result.reference_tokens == tokens
    for name in ("paper", "calibrated"):
        memory = RoutingMemory.from_pretrained(demo.folder / name)
        assert len(memory) == tokens
        assert (memory.manifest.calibration is None) == (name == "paper")


@pytest.mark.slow
def test_the_results_are_those_of_the_runs_on_disk(demo: Any) -> None:
    result = demo.result
    assert [line.method for line in result.lines] == ["zero-shot", PAPER, CALIBRATED, CONTROL]
    from_folder = compare_runs(str(demo.folder / "runs"), "zero-shot")
    assert {line.method: line for line in from_folder} == {one.method: one for one in result.lines}
    runs = {run.method: run for run in read_runs(demo.folder / "runs")}
    facts = json.loads(json.dumps(result.to_dict()))
    assert (facts["model"], facts["test_tokens"]) == ("tiny-olmoe", 7 * 128)
    assert (facts["reference"], facts["test"]) == (
        result.text.reference_name,
        result.text.test_name,
    )
    for found in facts["results"]:
        run = runs[found["method"]]
        assert found["nll"] == pytest.approx(sum(sample.nll or 0.0 for sample in run.samples) / 7)
        assert found["perplexity"] == pytest.approx(math.exp(found["nll"]))
        assert found["routing"] == run.facts.get("routing")
    for run in list(result.runs)[1:]:
        confidence, rerouted = run.facts["routing"].values()
        assert len(confidence) == len(rerouted) == 6
        assert all(0 < share <= 1 for share in (*confidence.values(), *rerouted.values()))


@pytest.mark.slow
def test_the_losses_are_those_of_the_model_with_the_saved_memories(
    demo: Any, tiny_olmoe: PreTrainedModel, windows: torch.Tensor
) -> None:
    alone, *others, _ = demo.result.lines
    assert alone.nll == pytest.approx(float(token_losses(tiny_olmoe, windows, 8).nll.mean()))
    for name, line in zip(("paper", "calibrated"), others, strict=True):
        with attach(tiny_olmoe, RoutingMemory.from_pretrained(demo.folder / name)):
            losses = token_losses(tiny_olmoe, windows, 8)
        assert line.nll == pytest.approx(float(losses.nll.mean()), abs=1e-5)
        assert line.score.mean == pytest.approx(float(losses.correct.float().mean()), abs=1e-3)


@pytest.mark.slow
def test_the_calibrated_memory_beats_the_model_and_the_control(demo: Any) -> None:
    alone, _, calibrated, control = demo.result.lines
    assert calibrated.nll < alone.nll - 0.01
    assert calibrated.nll < control.nll - 0.01


@pytest.mark.slow
def test_passages_are_windows_of_the_test_text(
    demo: Any, tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, windows: torch.Tensor
) -> None:
    alone = token_losses(tiny_olmoe, windows, 8).nll
    with attach(tiny_olmoe, RoutingMemory.from_pretrained(demo.folder / "calibrated")):
        routed = token_losses(tiny_olmoe, windows, 8).nll
    gains = (alone - routed).sum(dim=1)
    expected = (gains.max(), gains.median(), gains.min())
    for passage, gain in zip(demo.result.passages, expected, strict=True):
        assert passage.gain == pytest.approx(float(gain), abs=1e-3)
        place = windows.tolist().index([token.id for token in passage.tokens])
        whole = tiny_tokenizer.decode(windows[place])  # no character is torn
        assert "".join(token.text for token in passage.tokens) == whole
        before, after = torch.tensor(passage.losses).T
        torch.testing.assert_close(before, alone[place], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(after, routed[place], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_recalled_cases_are_in_the_reference(demo: Any, tiny_tokenizer: Any) -> None:
    sample = sample_reference(TEXT.reference, tiny_tokenizer, CONFIG.reference_tokens)
    pieces = [piece.completion for piece in sample]
    shown = {
        case.before + case.token + case.after
        for passage in demo.result.passages
        for token in passage.tokens
        for effect in token.effects
        for case in effect.cases
    }
    whole = {text for text in shown if "\ufffd" not in text}  # others begin within a character
    assert len(whole) > 0.9 * len(shown)
    assert all(any(text in piece for piece in pieces) for text in whole)


@pytest.mark.slow
def test_the_report_tells_the_story(demo: Any) -> None:
    html = render_demo(demo.result)
    assert_self_contained(html)
    text = " ".join(Page(html).text.split())
    perplexities = [f"{math.exp(line.nll):.2f}" for line in demo.result.lines]
    assert all(value in text for value in perplexities)
    assert f"from {perplexities[0]} to {perplexities[2]}" in text
    assert f"it rises from {perplexities[0]} to {perplexities[3]}" in text
    assert all(passage.title in text for passage in demo.result.passages)


@pytest.mark.slow
def test_the_model_is_left_unchanged(
    demo: Any, tiny_olmoe: PreTrainedModel, windows: torch.Tensor
) -> None:
    assert demo.result.model == "tiny-olmoe"  # the demo has run
    with torch.no_grad():
        expected = trained("tiny-olmoe")(windows[:2]).logits
        assert torch.equal(tiny_olmoe(windows[:2]).logits, expected)


def test_a_short_test_text_is_refused_before_anything_is_built(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, tmp_path: Any
) -> None:
    short = DemoText([Example.of("a text")], [Example.of("another")], "one", "two")
    with pytest.raises(TaskDataError, match="tokens, fewer than a window of 128"):
        run_demo(tiny_olmoe, tiny_tokenizer, short, CONFIG, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_too_few_reference_texts_are_refused_before_anything_is_built(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, tmp_path: Any
) -> None:
    few = replace(TEXT, reference=PIECES[:3])
    with pytest.raises(CalibrationError, match=r"there are 3 in .* Read more tokens \(--tokens\)"):
        run_demo(tiny_olmoe, tiny_tokenizer, few, CONFIG, tmp_path)
    assert list(tmp_path.iterdir()) == []
