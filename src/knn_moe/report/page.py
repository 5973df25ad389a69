"""The report page: a demo's result through a template into one file that needs no network.

Knows which chart shows which part of the result; the words are in the template.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from knn_moe.demo.result import DemoResult, Score
from knn_moe.report import passages, words
from knn_moe.report.charts import Series, grouped_bars, heat_map


@dataclass(frozen=True)
class Mover:
    """An expert chosen more or less often with the memory."""

    layer: int
    expert: int
    before: float
    after: float

    @property
    def change(self) -> float:
        return self.after - self.before


def write_report(result: DemoResult, path: Path) -> None:
    write_page(render_report(result), path)


def write_page(page: str, path: Path) -> None:
    """Write the page under a temporary name, then rename it: `path` is never half a page."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        # A token may hold half of a character; a reference to it reads as one unknown character.
        partial.write_text(page, encoding="utf8", errors="xmlcharrefreplace", newline="\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def render_report(result: DemoResult) -> str:
    return render("demo.html.j2", _context(result))


def render(template: str, context: dict[str, Any]) -> str:
    environment = Environment(
        loader=FunctionLoader(_source),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["say"] = words
    return environment.get_template(template).render(context)


def _source(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf8")


def _context(result: DemoResult) -> dict[str, Any]:
    movers = sorted(_movers(result), key=lambda mover: mover.change)
    return {
        "result": result,
        "headline": words.headline(result.scores),
        "alone": result.scores[0] if result.scores else None,
        "ways": [score.way for score in _compared(result)],
        "layer_charts": list(_layer_charts(result)),
        "expert_charts": list(_expert_charts(result)),
        "gained": [mover for mover in movers[:-6:-1] if mover.change > 0],
        "lost": [mover for mover in movers[:5] if mover.change < 0],
        "tercile_chart": _tercile_chart(result),
        "passages": [passages.show_passage(passage) for passage in result.passages],
        "factors": passages.FACTORS,
    }


def _compared(result: DemoResult) -> tuple[Score, ...]:
    """All but the model alone. A way's place here is its look in every chart."""
    return result.scores[1:]


def _layer_charts(result: DemoResult) -> Iterator[tuple[str, Markup]]:
    """Caption and chart, for each thing known of each layer."""
    wanted = (
        ("Mean confidence (λ) by layer", "confidence", words.PLAIN),
        ("Share of tokens rerouted, by layer", "rerouted", words.Unit(0, 100, "%")),
    )
    names = [f"layer {layer}" for layer in result.layers]
    for caption, field, unit in wanted:
        series = [
            Series(score.way, style, getattr(score, field))
            for style, score in enumerate(_compared(result))
            if getattr(score, field)
        ]
        if series:
            yield caption, Markup(grouped_bars(caption, names, series, unit))


def _expert_charts(result: DemoResult) -> Iterator[dict[str, Any]]:
    """Three maps of layers × experts; the first two share a scale."""
    before, after = result.experts.before, result.experts.after
    change = [
        [new - old for old, new in zip(*rows, strict=True)]
        for rows in zip(before, after, strict=True)
    ]
    if not change:
        return
    most = _largest([*before, *after])
    for caption, rows, limit, unit in (
        ("Without the memory", before, most, words.SHARE),
        ("With it", after, most, words.SHARE),
        ("Change", change, _largest(change), words.POINTS),
    ):
        label = f"{caption}: share of tokens each expert was chosen for, layers by experts"
        yield {
            "caption": caption,
            "chart": Markup(heat_map(label, rows, result.layers, limit, unit)),
            "low": unit.say(-limit if unit.signed else 0.0),
            "high": unit.say(limit),
            "diverging": unit.signed,
        }


def _largest(rows: Any) -> float:
    return max(
        (abs(value) for row in rows for value in row if abs(value) < float("inf")), default=0
    )


def _movers(result: DemoResult) -> Iterator[Mover]:
    rows = zip(result.layers, result.experts.before, result.experts.after, strict=False)
    for layer, before, after in rows:
        for expert, (old, new) in enumerate(zip(before, after, strict=True)):
            yield Mover(layer, expert, old, new)


def _tercile_chart(result: DemoResult) -> Markup | None:
    """The change against the model alone, where it was sure and where it was not."""
    if not result.terciles or not _compared(result):
        return None
    series = []
    for style, score in enumerate(_compared(result)):
        changes = [third.change[score.way] for third in result.terciles]
        values = tuple(change.difference for change in changes)
        series.append(
            Series(score.way, style, values, tuple((change.low, change.high) for change in changes))
        )
    names = [third.name for third in result.terciles]
    label = "Change in nats per token against the model alone, by third of the test windows"
    return Markup(grouped_bars(label, names, series, words.NATS_CHANGE))
