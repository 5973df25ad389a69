"""What a memory did to each token, as plain values: for JSON, for pages, and as lines of text.

Knows numbers and text; nothing of models or tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from knn_moe.errors import ConfigError

_WIDTH: Final = 100  # columns of a table of text
_SHORTEST: Final = 24  # of its column of recalled text
_SHOWN: Final = 20  # tokens that a repr shows
_SIGNS: Final = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


@dataclass(frozen=True)
class RecalledCase:
    """What one layer recalled for one token: the nearest case, and what recalling did."""

    layer: int
    before: str  # the text the case was read in, up to its own token
    token: str  # the token it was read at
    after: str  # the token that followed there
    # 1 is the usual distance between neighbours, of the layer or of the case's domain there;
    # cosine: of unit vectors
    distance: float
    confidence: float  # λ
    experts_in: Mapping[int, float]  # that came in → their Δlogit: mixed less the router's own
    experts_out: Mapping[int, float]  # that went out, likewise
    weight: float  # this case's share of what all K recalled cases propose
    row: int | None  # of the memory; None: no case was found
    example: int | None  # of the reference set, as a number in the order given
    squared_distance: float  # of the vectors that the similarity compares: see LayerTrace

    @property
    def changed(self) -> bool:
        return bool(self.experts_in or self.experts_out)


@dataclass(frozen=True)
class ExplainedToken:
    """A token that the model read, and what each attached layer recalled there."""

    id: int
    text: str
    cases: tuple[RecalledCase, ...]

    @property
    def confidence(self) -> float:
        """Mean λ of the layers."""
        return sum(case.confidence for case in self.cases) / max(len(self.cases), 1)

    @property
    def changed(self) -> float:
        """The share of layers whose experts changed."""
        return sum(case.changed for case in self.cases) / max(len(self.cases), 1)

    @property
    def strongest(self) -> RecalledCase | None:
        """Of the layer with the largest λ; None where no layer has a memory attached."""
        return max(self.cases, key=lambda case: case.confidence, default=None)


@dataclass(frozen=True, repr=False)
class Explanation:
    """Every token of every sequence, padding left out."""

    layers: tuple[int, ...]
    sequences: tuple[tuple[ExplainedToken, ...], ...]

    @property
    def tokens(self) -> tuple[ExplainedToken, ...]:
        """Of all sequences, one after the other."""
        return tuple(token for sequence in self.sequences for token in sequence)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: what is not a finite number becomes null."""
        return {
            "layers": list(self.layers),
            "sequences": [[_as_json(token) for token in sequence] for sequence in self.sequences],
        }

    def only(self, layers: Sequence[int]) -> Explanation:
        """Of these layers alone."""
        for layer in layers:
            if layer not in self.layers:
                raise ConfigError(
                    f"No memory is attached to layer {layer}. Attached are: {list(self.layers)}."
                )
        kept = tuple(layer for layer in self.layers if layer in layers)
        sequences = tuple(
            tuple(
                replace(token, cases=tuple(case for case in token.cases if case.layer in kept))
                for token in sequence
            )
            for sequence in self.sequences
        )
        return Explanation(kept, sequences)

    def table(self, layer: int | None = None, width: int = _WIDTH) -> str:
        """One line a token: mean λ, layers changed, and the case that was recalled most surely.
        Of one `layer`: the case, its distance, λ, and the experts in and out with their Δlogit."""
        chosen = self if layer is None else self.only([layer])
        lines: list[str] = []
        for number, sequence in enumerate(chosen.sequences):
            if len(chosen.sequences) > 1:
                lines.append(f"sequence {number + 1} of {len(chosen.sequences)}")
            lines += _overview(sequence, width) if layer is None else _details(sequence, width)
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        tokens, layers = self.tokens, len(self.layers)
        head = f"Explanation({len(tokens):,} tokens × {layers} layers, mean λ {_mean(tokens):.2f})"
        lines = list(_overview(tokens[:_SHOWN], _WIDTH)) if tokens and layers else []
        if lines and len(tokens) > _SHOWN:
            lines.append(f"… {len(tokens) - _SHOWN:,} more tokens: print it, or see its table()")
        return "\n".join([head, *lines])


def _overview(tokens: Sequence[ExplainedToken], width: int) -> Iterator[str]:
    yield f"{'token':<14} {'mean λ':>6}  {'changed':>7}  {'layer':>5}  recalled"
    for token in tokens:
        case = token.strongest
        line = f"{_cell(token.text, 14)} {token.confidence:6.2f}"
        if case is not None:
            changed = f"{sum(one.changed for one in token.cases)}/{len(token.cases)}"
            line += f"  {changed:>7}  {case.layer:5}  {_recalled(case, width - 39)}"
        yield line


def _details(tokens: Sequence[ExplainedToken], width: int) -> Iterator[str]:
    """Of tokens with one case each."""
    moves = [
        f"{_moves('in', token.cases[0].experts_in)} {_moves('out', token.cases[0].experts_out)}"
        for token in tokens
    ]
    room = max(width - 35 - max((len(move) for move in moves), default=0), _SHORTEST)
    yield f"{'token':<14} {'λ':>5}  {'distance':>8}  {'recalled':<{room}}  experts (Δlogit)"
    for token, move in zip(tokens, moves, strict=True):
        case = token.cases[0]
        text = _recalled(case, room)
        numbers = f"{case.confidence:5.2f}  {case.distance:8.2f}"
        yield f"{_cell(token.text, 14)} {numbers}  {text:<{room}}  {move}".rstrip()


def _recalled(case: RecalledCase, width: int) -> str:
    """The end of what the case was read in, its token in brackets, and what followed."""
    if case.row is None:
        return "nothing"
    marked = f"[{one_line(case.token)}]{one_line(case.after)}"
    room = max(width, _SHORTEST) - len(marked) - 1
    before = one_line(case.before)[-room:] if room > 0 else ""
    return f"…{before}{marked}" if case.before else marked


def _moves(name: str, experts: Mapping[int, float]) -> str:
    told = ", ".join(f"{expert} ({change:+.2f})" for expert, change in experts.items())
    return f"{name} {told}" if told else ""


def _cell(text: str, width: int) -> str:
    """The token between bars: a space at its edge is seen."""
    inner = one_line(text)
    inner = inner if len(inner) <= width - 2 else f"{inner[: width - 3]}…"
    return f"|{inner}|".ljust(width)


def one_line(text: str) -> str:
    """As a terminal can take it: signs for new lines and tabs, none of its commands."""
    signed = (_SIGNS.get(letter, letter) for letter in text)
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in signed
    )


def _mean(tokens: Sequence[ExplainedToken]) -> float:
    return sum(token.confidence for token in tokens) / max(len(tokens), 1)


def _as_json(token: ExplainedToken) -> dict[str, Any]:
    facts = {"id": token.id, "text": token.text}
    means = _finite({"mean_confidence": token.confidence, "changed": token.changed})
    cases = [_finite(asdict(case)) for case in token.cases]
    return {**facts, **means, "cases": cases}


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
