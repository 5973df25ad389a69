"""The page of evaluated runs: scores, changes, questions and answers, routing, and passages.

Questions are shown where their runs keep them: the authors of some tasks ask for secrecy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from knn_moe.evaluation.compare import AVERAGE, Line, compare_runs, explain_doubts
from knn_moe.evaluation.store import Run
from knn_moe.explain.reader import FACTORS, show_tokens
from knn_moe.pages.page import render
from knn_moe.report import figures, tables
from knn_moe.report.passages import Passage
from knn_moe.report.samples import show_samples
from knn_moe.tasks.task import TEXT

_NAMED: Final = 4  # tasks in a title


@dataclass(frozen=True)
class Introduction:
    """What a page says before its numbers, and the passages it shows."""

    title: str
    paragraphs: Sequence[str] = ()
    passages: Sequence[Passage] = ()


def render_runs(
    runs: Sequence[Run],
    against: str,
    resamples: int = 10_000,
    introduction: Introduction | None = None,
) -> str:
    """Return a page that compares runs.

    Args:
        against: The method that the others are compared with.
        resamples: Of the bootstrap.
        introduction: Title, text and passages of the page, if it tells a story of its own.

    Raises:
        RunError: The runs cannot be compared, or the questions of one cannot be read.
    """
    lines = compare_runs(runs, against, resamples)
    runs = sorted(runs, key=lambda run: run.method != against)
    tasks = list(dict.fromkeys(line.task for line in lines))
    runs = sorted(runs, key=lambda run: tasks.index(run.task))
    routing = {(run.task, run.method): means for run in runs if (means := mean_routing(run))}
    own = _introduce(runs, against)
    story = introduction or own
    context = {
        "introduction": story,
        "title": f"{introduction.title} ({own.title})" if introduction else own.title,
        "runs": runs,
        "against": against,
        "text": TEXT,
        "tested": len({line.task for line in lines if line.change and line.task != AVERAGE}),
        "near_ties": sum(line.near_ties for line in lines if line.task != AVERAGE),
        "questions": any(line.scoring != TEXT for line in lines),
        "chance": any(line.chance is not None for line in lines),
        "doubts": explain_doubts(lines),
        "results": tables.tabulate_results(lines, routing),
        "changes": tables.tabulate_changes(runs, against),
        "layers": tables.tabulate_layers(runs),
        "thirds": tables.tabulate_thirds(lines),
        "measured": tables.tabulate_runs(runs),
        "samples": show_samples(runs, against),
        "passages": [show_tokens(one.title, one.tokens) for one in story.passages],
        "factors": FACTORS,
        **_number_figures(runs, lines),
    }
    return render("runs.html.j2", context)


def _number_figures(runs: Sequence[Run], lines: Sequence[Line]) -> dict[str, Any]:
    """Return all figures, and for each section those it shows with their numbers."""
    methods = list(dict.fromkeys(line.method for line in lines))
    sections = {
        "score_figures": figures.score_figures(lines, methods),
        "layer_figures": figures.layer_figures(runs, methods),
        "third_figures": figures.third_figures(lines, methods),
    }
    drawn: list[figures.Figure] = []
    numbered: dict[str, list[tuple[int, figures.Figure]]] = {}
    for name, section in sections.items():
        numbered[name] = list(enumerate(section, len(drawn)))
        drawn += [figure for _, figure in numbered[name]]
    lined = [line for _, figure in numbered["layer_figures"] for line in figure["lines"]]
    legend = sorted({(line["style"], line["method"]) for line in lined})
    return {"legend": legend, "figures": drawn, **numbered}


def _introduce(runs: Sequence[Run], against: str) -> Introduction:
    """Say what was evaluated, for a page without a story of its own."""
    models = ", ".join(dict.fromkeys(str(run.facts["model"]["name"]) for run in runs))
    tasks = list(dict.fromkeys(run.task for run in runs))
    many = len(tasks) > _NAMED
    named = f"{len(tasks)} tasks" if many else ", ".join(tasks)
    others = [name for name in dict.fromkeys(run.method for run in runs) if name != against]
    if others:
        compared = f"Compared with {against}: {', '.join(others)}."
    else:
        compared = f"The method {against}, compared with no other."
    paragraphs = [compared]
    paragraphs += [f"The tasks are {', '.join(tasks)}."] if many else []
    return Introduction(f"{models} on {named}", paragraphs)


def mean_routing(run: Run) -> dict[str, float]:
    """Return "mean_confidence" (λ) and "rerouted", averaged over layers, where they are known."""
    return {
        name: sum(known) / len(known)
        for name, layers in run.facts.get("routing", {}).items()
        if (known := [value for value in layers.values() if value is not None])
    }
