"""Run the demo: build two memories, evaluate them beside the model alone and a control.

Knows the order of the work. Each step belongs to another package.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from knn_moe.adapt.calibrate.build_calibrated import build_calibrated
from knn_moe.adapt.controls import shuffle_values
from knn_moe.build.build import build_memory
from knn_moe.config import LEAST_EXAMPLES, BuildConfig, CalibrationConfig
from knn_moe.demo.passages import pick_passages
from knn_moe.demo.texts import TASK, DemoText, make_task, sample_reference
from knn_moe.errors import CalibrationError
from knn_moe.evaluation.compare import Line, compare_runs
from knn_moe.evaluation.evaluate import EvalConfig, evaluate, prepare_questions
from knn_moe.evaluation.store import Run
from knn_moe.methods import KnnMoe, Method, PreparedMethod, ZeroShot
from knn_moe.pages.words import format_p, format_perplexity
from knn_moe.report.passages import Passage
from knn_moe.report.runs import Introduction, render_runs
from knn_moe.support.progress import OnProgress, Progress, ignore_progress

ALONE: Final = ZeroShot.name
PAPER: Final = "knn-paper"
CALIBRATED: Final = "knn-calibrated"
CONTROL: Final = "knn-shuffled"
RUNS: Final = "runs"  # the folder of runs
CALIBRATION: Final = CalibrationConfig(neighbours=(32,), value_rates=(0.03,))  # one choice: fast


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """How much text is read. The defaults take two to three minutes on two cores."""

    reference_tokens: int = 12_000
    windows: int = 48  # of test text
    length: int = 256  # tokens in a window


@dataclass(frozen=True)
class DemoResult:
    """The demo's runs, the comparison of each with the model alone, and passages of the text."""

    text: DemoText
    reference_tokens: int
    runs: tuple[Run, ...]
    lines: tuple[Line, ...]
    passages: tuple[Passage, ...]

    @property
    def model(self) -> str:
        return str(self.runs[0].facts["model"]["name"])

    @property
    def test_tokens(self) -> int:
        return len(self.runs[0].samples) * int(self.runs[0].facts["settings"]["length"])

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON takes it, without the texts of recalled cases."""
        return {
            "model": self.model,
            "reference": self.text.reference_name,
            "reference_tokens": self.reference_tokens,
            "test": self.text.test_name,
            "test_tokens": self.test_tokens,
            "results": [
                {
                    **line.to_dict(),
                    "perplexity": perplexity(line),
                    "routing": run.facts.get("routing"),
                }
                for run, line in zip(self.runs, self.lines, strict=True)
            ],
            "passages": [
                {
                    "title": passage.title,
                    "tokens": [token.text for token in passage.tokens],
                    "losses": passage.losses,
                }
                for passage in self.passages
            ],
        }


def perplexity(line: Line) -> float:
    """Return e to the mean loss per token; infinity where that is too large a number."""
    return math.exp(line.nll) if line.nll is not None and line.nll < 700 else math.inf


def run_demo(
    model: Any,
    tokenizer: Any,
    text: DemoText,
    config: DemoConfig,
    folder: Path,
    on_progress: OnProgress = ignore_progress,
) -> DemoResult:
    """Build memories of the reference set and evaluate them on the test set.

    Args:
        folder: Where the memories (`paper`, `calibrated`) and the runs (`runs`) are written.

    Raises:
        CalibrationError: The reference set has too few texts.
    """
    data = make_task(text, tokenizer)
    evaluation = EvalConfig(batch_size=8, limit=config.windows, length=config.length)
    # Refuses a text that is too short.
    windows = prepare_questions(tokenizer, data, evaluation).questions
    reference = sample_reference(text.reference, tokenizer, config.reference_tokens)
    if len(reference) < LEAST_EXAMPLES:
        raise CalibrationError(
            f"The demo calibrates, which needs {LEAST_EXAMPLES} texts; there are {len(reference)} "
            f"in {config.reference_tokens:,} tokens of {text.reference_name}. Read more tokens "
            f"(--tokens), or give more text (--reference)."
        )

    inputs = model, tokenizer, reference, BuildConfig(max_length=config.length, batch_tokens=2048)
    started = time.perf_counter()
    place, report = folder / "calibrated", partial(_report, on_progress, "calibrated memory")
    calibrated, _ = build_calibrated(*inputs, CALIBRATION, folder=place, on_progress=report)
    finished = time.perf_counter()
    report = partial(_report, on_progress, "the paper's memory")
    paper = build_memory(*inputs, folder=folder / "paper", on_progress=report)
    seconds = finished - started
    methods: tuple[tuple[Method, float], ...] = (
        (ZeroShot(), 0.0),
        (KnnMoe(paper, name=PAPER), time.perf_counter() - finished),
        (KnnMoe(calibrated, name=CALIBRATED), seconds),
        (KnnMoe(shuffle_values(calibrated), name=CONTROL), seconds),
    )
    runs = []
    for method, spent in methods:
        runs.append(
            evaluate(
                model,
                tokenizer,
                data,
                PreparedMethod(method, spent, {}),
                evaluation,
                folder=folder / RUNS / TASK / method.name,
                on_progress=on_progress,
            )
        )
    lines = compare_runs(runs, ALONE)
    on_progress(Progress("explaining passages", 0, 1))
    passages = pick_passages(model, tokenizer, calibrated, windows, (runs[0], runs[2]))
    on_progress(Progress("explaining passages", 1, 1))
    tokens = len(calibrated.provenance.stream)
    return DemoResult(text, tokens, tuple(runs), tuple(lines), passages)


def _report(on_progress: OnProgress, prefix: str, progress: Progress) -> None:
    on_progress(progress._replace(stage=f"{prefix}: {progress.stage}"))


def render_demo(result: DemoResult) -> str:
    """Return the demo's report: the page of its runs, with a story and passages."""
    alone, _, calibrated, control = result.lines
    first = result.runs[0].facts
    layers = len(result.runs[2].facts["routing"]["mean_confidence"])
    headline = (
        f"With the calibrated memory, perplexity {_describe_move(alone, calibrated)}. With a "
        f"control, the same memory with its values shuffled, it {_describe_move(alone, control)}."
    )
    story = (
        f"The model is {result.model}. Both memories were built from {result.reference_tokens:,} "
        f"tokens of {result.text.reference_name}, and tested on {result.test_tokens:,} tokens of "
        f"{result.text.test_name}, in windows of {first['settings']['length']}. No weight was "
        f"changed: in each of {layers} layers the router recalls the nearest cases "
        f"of the memory and moves its choice of experts towards the one that would have served "
        f"them better."
    )
    methods = (
        f"{ALONE} is the model alone. {PAPER} is the paper's method with the paper's settings. "
        f"{CALIBRATED} chose its settings on parts of the reference set that it held out. "
        f"{CONTROL} is the control: it should not help."
    )
    limits = (
        "The model is small and the texts are short: this page checks that the method works here, "
        "and does not measure what it gains on a large model."
    )
    title = "What a routing memory does for a frozen model"
    introduction = Introduction(title, (headline, story, methods, limits), result.passages)
    return render_runs(result.runs, ALONE, introduction=introduction)


def _describe_move(alone: Line, line: Line) -> str:
    change = line.nll_change
    levels = f"from {format_perplexity(alone.nll)} to {format_perplexity(line.nll)}"
    if change is None or not change.significant:
        return f"goes {levels}, which may be chance"
    return f"{'falls' if change.difference < 0 else 'rises'} {levels} ({format_p(change.p)})"
