"""Explanations as tables of text that fit a terminal.

Recalled text is shortened where it must be; tokens' experts never are: they go to lines of their
own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len, set_cell_size

from knn_moe.support.terminal import one_line

if TYPE_CHECKING:
    from knn_moe.explain.explanation import ExplainedToken, LayerEffect

WIDTH: Final = 80  # columns of a terminal, where nothing else is known
_TOKEN: Final = 12  # columns of a token
_SHORTEST: Final = 18  # columns of recalled text, at least
PART: Final = "·"  # a token that is only a part of a character
_LIKELIHOOD: Final = 72  # a table of so many columns has a column of probabilities


def overview(tokens: Sequence[ExplainedToken], width: int) -> Iterator[str]:
    """Yield a line for each token, and one for what may come after the last."""
    likely = width >= _LIKELIHOOD and any(token.predictions for token in tokens)
    head = f"{'token':<{_TOKEN}} {'mean λ':>6}  {'changed':>7}  "
    head += f"{'next token':>14}  " if likely else ""
    room = max(width - len(head) - len("layer  "), _SHORTEST)
    yield f"{head}layer  recalled"
    for token in tokens:
        line, effect = f"{_cell(token.text, _TOKEN)} {token.confidence:6.2f}", token.strongest
        changed = sum(one.changed for one in token.effects)
        line += f"  {f'{changed}/{len(token.effects)}':>7}" if effect else " " * 9
        if likely:
            line += f"  {_move(token):>14}"
        if effect is not None:
            line += f"  {effect.layer:5}  {_recalled(effect, room)}"
        yield line.rstrip()
    if likely and tokens[-1].following is None:
        yield from _expected(tokens[-1], width)


def _move(token: ExplainedToken) -> str:
    """Return the probability of the token that came next, without the memory and with it."""
    next_one = token.following
    return "" if next_one is None else f"{_share(next_one.alone)} → {_share(next_one.with_memory)}"


def _expected(token: ExplainedToken, width: int) -> Iterator[str]:
    """Yield the likeliest tokens after the text: each with its probability without and with it."""
    parts = [
        f"{_cell(one.text)} {_share(one.alone)} → {_share(one.with_memory)}"
        for one in token.predictions
        if one.text
    ]
    yield from _wrap("what may come next: ", parts[:4], width)


def details(tokens: Sequence[ExplainedToken], width: int) -> Iterator[str]:
    """Yield the lines of tokens with one layer each."""
    swaps = [_swaps(token.effects[0]) for token in tokens]
    head = f"{'token':<{_TOKEN}} {'λ':>5}  {'distance':>8}  "
    longest = max((cell_len("  ".join(parts)) for parts in swaps), default=0)
    beside = len(head) + _SHORTEST + 2 + max(longest, len("experts (Δlogit)")) <= width
    room = max(width - len(head) - (longest + 2 if beside else 0), _SHORTEST)
    yield head + ("recalled".ljust(room + 2) + "experts (Δlogit)" if beside else "recalled")
    for token, parts in zip(tokens, swaps, strict=True):
        effect = token.effects[0]
        distance = f"{effect.cases[0].distance:8.2f}" if effect.cases else " " * 8
        line = f"{_cell(token.text, _TOKEN)} {effect.confidence:5.2f}  {distance}  "
        text = _recalled(effect, room)
        if beside:
            yield f"{line}{_fill(text, room)}  {'  '.join(parts)}".rstrip()
        else:
            yield f"{line}{text}"
            yield from _wrap(" " * _TOKEN + " experts ", parts, width) if parts else ()


def _recalled(effect: LayerEffect, width: int) -> str:
    """Return the end of the nearest case's text, its token in brackets, and the token after it."""
    if not effect.cases:
        return "nothing"
    case = effect.cases[0]
    token, after, before = (one_line(text) for text in (case.token, case.after, case.before))
    token = token or PART
    room = width - len("[]") - cell_len(token) - cell_len(after) - bool(before)
    if room < 0:  # the token comes first, then what followed
        token = _shorten(token, width - len("[]") - bool(before))
        left = width - len("[]") - cell_len(token) - bool(before)
        after, before = _shorten(after, left), before[:0]
        return f"{'…' if case.before else ''}[{token}]{after}"
    return f"{'…' if before else ''}{_end(before, room)}[{token}]{after}"


def _swaps(effect: LayerEffect) -> list[str]:
    return [
        *_experts("in", effect.experts_in),
        *_experts("out", effect.experts_out),
    ]


def _experts(direction: str, experts: Mapping[int, float]) -> list[str]:
    """Return the experts, each with its Δlogit; the first also says where they went."""
    shown = [f"{expert} ({change:+.2f})" for expert, change in experts.items()]
    return [f"{direction} {shown[0]}", *shown[1:]] if shown else []


def _wrap(head: str, parts: Sequence[str], width: int) -> Iterator[str]:
    """Yield lines of whole parts, later ones as far indented as the first."""
    line, empty = head, True
    for part in parts:
        if not empty and cell_len(line) + 2 + cell_len(part) > width:
            yield line
            line, empty = " " * len(head), True
        line, empty = line + ("" if empty else "  ") + part, False
    yield line


def _share(probability: float) -> str:
    percent = 100 * probability
    if percent < 0.005:
        return "<0.01%"
    return f"{percent:.{0 if percent >= 9.95 else 1 if percent >= 0.095 else 2}f}%"


def _cell(text: str, width: int = 0) -> str:
    """Return the token between bars, which make a space at its edge visible."""
    inner = one_line(text) or PART
    inner = _shorten(inner, width - 2) if width else inner
    return _fill(f"|{inner}|", width)


def _fill(text: str, width: int) -> str:
    return text + " " * max(width - cell_len(text), 0)


def _shorten(text: str, width: int) -> str:
    """Return text of at most so many columns; a sign shows that it goes on."""
    if cell_len(text) <= width:
        return text
    return f"{set_cell_size(text, width - 1).rstrip()}…" if width > 0 else ""


def _end(text: str, width: int) -> str:
    """Return the end of a text, of at most so many columns."""
    while cell_len(text) > width:
        text = text[max(1, (cell_len(text) - width) // 2) :]
    return text
