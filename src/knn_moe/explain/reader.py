"""Texts to be read token by token on a page: each token's look, and what the panel says of it.

A token is shown with what led to it: the model's prediction after the token before, and what was
recalled there. After the last token comes a place for what may follow. Knows explanations; nothing
of HTML.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from knn_moe.explain.explanation import ExplainedToken, LayerEffect, Prediction, RecalledCase
from knn_moe.pages import words

# A token takes the next colour where its probability rose or fell by this factor.
FACTORS: Final = (1.1, 1.5, 2.0, 4.0)
_LIKELIEST: Final = 5  # next tokens of either run
_HALVES: Final = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class ShownToken:
    """A token on a page."""

    text: str
    classes: str  # for the style sheet


@dataclass(frozen=True)
class ShownPassage:
    """A passage on a page.

    `data` is what its script reads, as small as JSON can be:

    - layers: their numbers; experts: how many a token uses;
    - texts: [before, token, after, example] of each recalled case;
    - opens: the place that is shown first; rise: how much likelier its token became;
    - places, one for each token: null, or
      - said, alone, memory, bars: how the token's probability changed, in words and as two numbers;
      - step: its colour, from -4 to 4;
      - expected: for each run, [text, probability, whether it came] of the likeliest tokens;
      - layers: for each layer [λ ‰, experts, experts of the model alone, [expert, Δlogit] that came
        in, [expert, Δlogit] that left, cases], where the cases are one list of three numbers for
        each: its text, its weight in 1/10,000 and its distance in 1/100.
    """

    title: str
    summary: str
    tokens: tuple[ShownToken, ...]
    data: dict[str, Any]

    @property
    def json(self) -> Markup:
        """The data, for a script element."""
        compact: dict[str, Any] = {"ensure_ascii": False, "separators": (",", ":")}
        text = htmlsafe_json_dumps(self.data, **compact)
        # A file cannot hold half of a character; JSON can name it.
        return Markup(_HALVES.sub(lambda half: f"\\u{ord(half[0]):04x}", text))


def show_tokens(title: str, tokens: Sequence[ExplainedToken]) -> ShownPassage:
    """Return what a page shows of one text."""
    texts = _Texts()
    steps = [0, *(_step(token.following) for token in tokens)]
    places = [None, *(_show_place(token, texts) for token in tokens)]
    shown = [
        ShownToken(token.text, css_classes(token.text, step))
        for token, step in zip(tokens, steps, strict=False)
    ]
    if tokens[-1].predictions and tokens[-1].following is None:
        shown.append(ShownToken("", "t next"))
    opens = find_telling(tokens)
    following = tokens[opens - 1].following
    data = {
        "layers": [effect.layer for effect in tokens[0].effects],
        "experts": max((len(one.experts) for one in tokens[0].effects), default=0),
        "texts": texts.rows,
        "opens": opens,
        "rise": _rise(following) if following else -1,
        "places": places[: len(shown)],
    }
    return ShownPassage(title, summarise(tokens), tuple(shown), data)


def show_place(token: ExplainedToken) -> dict[str, Any]:
    """Return what the panel says of one place, the one after `token`: the `layers` and `texts` of
    ShownPassage's data, and its `place`."""
    texts = _Texts()
    place = _show_place(token, texts)
    layers = [effect.layer for effect in token.effects]
    return {"layers": layers, "texts": texts.rows, "place": place}


def find_telling(tokens: Sequence[ExplainedToken]) -> int:
    """Return the place of the token that a page opens on.

    It is the one whose probability the memory raised most, in percentage points; if it raised none,
    the one that was predicted with the largest mean λ.
    """
    rises = [-math.inf if one.following is None else _rise(one.following) for one in tokens]
    best = max(range(len(tokens)), key=lambda place: rises[place])
    if rises[best] > 0:
        return best + 1
    known = [place for place, rise in enumerate(rises) if rise > -math.inf]
    if not known:  # only the last place, for what may follow
        return len(tokens) if tokens[-1].predictions else len(tokens) - 1
    return max(known, key=lambda place: tokens[place].confidence) + 1


def css_classes(text: str, step: int) -> str:
    """Return the classes of a token whose colour is `step`, from -4 to 4."""
    names = ["t", *([f"{'up' if step > 0 else 'down'}-{abs(step)}"] if step else [])]
    if not text:
        names.append("part")
    elif not text.strip() and "\n" in text:
        names.append("newline")
    return " ".join(names)


def colour(before: float, after: float) -> int:
    """Return the colour of a token by its losses: -4, much less likely, to 4, much likelier."""
    gain = before - after
    reached = sum(abs(gain) >= math.log(factor) for factor in FACTORS)
    return reached if gain > 0 else -reached


def _step(following: Prediction | None) -> int:
    return 0 if following is None else colour(*following.losses)


def _rise(following: Prediction) -> float:
    rise = following.with_memory - following.alone
    return rise if math.isfinite(rise) else -1.0


class _Texts:
    """The texts of recalled cases, each once, and their places."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str, int]] = []
        self._places: dict[tuple[str, str, str, int], int] = {}

    def place(self, case: RecalledCase) -> int:
        row = (case.before, case.token, case.after, case.example)
        place = self._places.setdefault(row, len(self.rows))
        if place == len(self.rows):
            self.rows.append(row)
        return place


def _show_place(token: ExplainedToken, texts: _Texts) -> dict[str, Any]:
    """Return what the panel says of the place after `token`."""
    came = token.following
    shown: dict[str, Any] = {"layers": [_show_effect(one, texts) for one in token.effects]}
    if token.predictions:
        shown["expected"] = [
            [
                [one.text, words.format_probability(one.losses[run]), int(came == one)]
                for one in sorted(token.predictions, key=lambda each: each.losses[run])[:_LIKELIEST]
            ]
            for run in (0, 1)
        ]
    if came is not None:
        shown["said"] = words.describe_change(*came.losses)
        shown["alone"], shown["memory"] = map(words.format_probability, came.losses)
        shown["bars"] = [_finite(came.alone), _finite(came.with_memory)]
        shown["step"] = colour(*came.losses)
    return shown


def _show_effect(effect: LayerEffect, texts: _Texts) -> list[Any]:
    cases = [
        number
        for case in effect.cases
        for number in (texts.place(case), _whole(case.weight, 10_000), _whole(case.distance, 100))
    ]
    moved = [_experts(experts) for experts in (effect.experts_in, effect.experts_out)]
    return [_whole(effect.confidence, 1000), effect.experts, effect.experts_alone, *moved, cases]


def _experts(changes: Mapping[int, float]) -> list[tuple[int, str]]:
    return [(expert, words.LOGITS.format(change)) for expert, change in changes.items()]


def _whole(value: float, scale: int) -> int:
    """Return a number that JSON writes shortly; it takes none that is not finite."""
    return round(value * scale) if math.isfinite(value) else 0


def _finite(value: float) -> float:
    return round(value, 4) if math.isfinite(value) else 0.0


def summarise(tokens: Sequence[ExplainedToken]) -> str:
    """Say in one sentence what the memory changed in a text."""
    losses = [token.following.losses for token in tokens if token.following is not None]
    confidence = words.format_mean([token.confidence for token in tokens], words.PLAIN)
    changed = words.format_mean([token.changed for token in tokens], words.SHARE)
    routed = f"mean λ {confidence}; experts changed in {changed} of all layers and tokens"
    if not losses:
        return f"{len(tokens):,} token{'s' * (len(tokens) > 1)}, {routed}."
    alone, with_memory = (sum(column) / len(losses) for column in zip(*losses, strict=True))
    change = words.NATS_CHANGE.format(with_memory - alone)
    return (
        f"{len(tokens):,} tokens. {words.NATS.format(alone)} nats per token without the memory, "
        f"{words.NATS.format(with_memory)} with it ({change}); {routed}."
    )
