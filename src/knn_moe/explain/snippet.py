"""What a notebook shows of an explanation: the coloured text, and the tokens that changed most.

A piece of HTML without scripts, so that it also shows in a notebook that is not trusted, and where
one is read on the web. The page that `Explanation.save` writes has everything else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final

from knn_moe.explain.explanation import ExplainedToken, Explanation, Prediction
from knn_moe.explain.reader import FACTORS, colour
from knn_moe.explain.tables import PART
from knn_moe.pages import words
from knn_moe.support.summary_table import SummaryTable
from knn_moe.support.terminal import printable

_MOST_TOKENS: Final = 400  # of a text that are shown
_ROWS: Final = 8
_BLUE, _ORANGE = "56, 132, 214", "230, 126, 34"  # readable behind light and behind dark text
_OPACITY: Final = (0.0, 0.15, 0.3, 0.45, 0.6)
_TEXT: Final = "white-space: pre-wrap; font-family: monospace; line-height: 1.7; max-width: 90ch"
_CASE: Final = 40  # characters of a recalled text


def render_snippet(explanation: Explanation) -> str:
    """Return the piece of HTML."""
    texts = [_show_text(tokens) for tokens in explanation.sequences if tokens]
    table = SummaryTable(
        title="Tokens whose probability changed most",
        columns=("token", "nearest case of the layer with the largest λ", "alone", "with memory"),
        rows=[_row(*each) for each in _most_changed(explanation.tokens)],
        texts=2,
        notes=(
            f"{explanation.model} with {explanation.memory}, attached to "
            f"{len(explanation.layers)} layers. Blue: likelier with the memory; orange: less "
            f"likely; darker from a factor of {', '.join(f'{one:g}' for one in FACTORS)}. "
            'explanation.save("page.html") writes a page with every layer and every case.',
        ),
    )
    return "".join([*texts, table.to_html()])


def _show_text(tokens: Sequence[ExplainedToken]) -> str:
    shown = tokens[-_MOST_TOKENS:]
    previous: list[Prediction | None] = [None, *(token.following for token in shown)]
    spans = [
        _span(printable(token.text), came) for token, came in zip(shown, previous, strict=False)
    ]
    left_out = len(tokens) - len(shown)
    head = f"<p>The last {len(shown)} of {len(tokens):,} tokens:</p>" if left_out else ""
    return f'{head}<div style="{_TEXT}">{"".join(spans)}</div>'


def _span(text: str, came: Prediction | None) -> str:
    step = 0 if came is None else colour(*came.losses)
    if came is None or not step:
        return escape(text)
    tint = f"rgba({_BLUE if step > 0 else _ORANGE}, {_OPACITY[abs(step)]})"
    said = f"{_share(came, 0)} alone, {_share(came, 1)} with the memory"
    return f'<span style="background: {tint}" title="{escape(said)}">{escape(text)}</span>'


def _share(came: Prediction, run: int) -> str:
    return words.format_probability(came.losses[run])


def _most_changed(
    tokens: Sequence[ExplainedToken],
) -> list[tuple[ExplainedToken, Prediction]]:
    """Return tokens and what came next, the largest changes first."""
    known = [(token, token.following) for token in tokens if token.following is not None]
    finite = [each for each in known if math.isfinite(_change(each[1]))]
    return sorted(finite, key=lambda each: -abs(_change(each[1])))[:_ROWS]


def _change(came: Prediction) -> float:
    return came.with_memory - came.alone


def _row(token: ExplainedToken, came: Prediction) -> tuple[str, ...]:
    strongest = token.strongest
    case = strongest.cases[0] if strongest is not None and strongest.cases else None
    recalled = f"…{case.before}[{case.token or PART}]{case.after}" if case else words.NONE
    if len(recalled) > _CASE:
        recalled = f"…{recalled[-_CASE:]}"
    return f"|{came.text or PART}|", recalled, _share(came, 0), _share(came, 1)
