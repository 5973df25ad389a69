"""What a memory did to each token, as plain values, as JSON and as a table of text.

Knows numbers and text; knows nothing of models or tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from knn_moe.errors import ConfigError
from knn_moe.support.terminal import one_line

_WIDTH: Final = 100  # characters of a table's line
_SHORTEST: Final = 24  # characters of its column of recalled text, at least
_SHOWN: Final = 20  # tokens in a repr


@dataclass(frozen=True)
class RecalledCase:
    """What one layer recalled for one token: the nearest case and its effect."""

    layer: int
    before: str  # the reference text before the case's token
    token: str  # the case's token
    after: str  # the token after it
    distance: float  # 1 is the usual one between neighbours in that layer; cosine: of unit vectors
    confidence: float  # λ
    experts_in: Mapping[int, float]  # experts that entered → their Δlogit (mixed minus own)
    experts_out: Mapping[int, float]  # experts that left → their Δlogit
    weight: float  # this case's share of the proposal of all K recalled cases
    row: int | None  # in the memory; None: no case was found
    example: int | None  # its number in the reference set
    squared_distance: float  # of the vectors that the similarity compares: see LayerTrace

    @property
    def changed(self) -> bool:
        """Whether the token's experts changed."""
        return bool(self.experts_in or self.experts_out)


@dataclass(frozen=True)
class ExplainedToken:
    """A token that the model read, and what each attached layer recalled for it."""

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
        """The case of the layer with the largest λ; None if no layer has a memory."""
        return max(self.cases, key=lambda case: case.confidence, default=None)


@dataclass(frozen=True, repr=False)
class Explanation:
    """What a memory did to every token of every sequence, without padding."""

    layers: tuple[int, ...]
    sequences: tuple[tuple[ExplainedToken, ...], ...]

    @property
    def tokens(self) -> tuple[ExplainedToken, ...]:
        """The tokens of all sequences, one after the other."""
        return tuple(token for sequence in self.sequences for token in sequence)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values: numbers that are not finite become null."""
        return {
            "layers": list(self.layers),
            "sequences": [[_as_json(token) for token in sequence] for sequence in self.sequences],
        }

    def only(self, layers: Sequence[int]) -> Explanation:
        """Return the explanation of these layers alone.

        Raises:
            ConfigError: No memory is attached to one of them.
        """
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
        """Return one line for each token.

        Without `layer`: mean λ, the layers whose experts changed, and the case with the largest λ.
        With it: the case, its distance, λ, and the experts that entered and left with their Δlogit.
        """
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
            lines.append(f"… {len(tokens) - _SHOWN:,} more tokens: print it, or use its table()")
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
    """Yield the lines of tokens with one case each."""
    swaps = [
        f"{_swap('in', token.cases[0].experts_in)} {_swap('out', token.cases[0].experts_out)}"
        for token in tokens
    ]
    room = max(width - 35 - max((len(swap) for swap in swaps), default=0), _SHORTEST)
    yield f"{'token':<14} {'λ':>5}  {'distance':>8}  {'recalled':<{room}}  experts (Δlogit)"
    for token, swap in zip(tokens, swaps, strict=True):
        case = token.cases[0]
        text = _recalled(case, room)
        numbers = f"{case.confidence:5.2f}  {case.distance:8.2f}"
        yield f"{_cell(token.text, 14)} {numbers}  {text:<{room}}  {swap}".rstrip()


def _recalled(case: RecalledCase, width: int) -> str:
    """Return the end of the case's text, its token in brackets, and the token after it."""
    if case.row is None:
        return "nothing"
    marked = f"[{one_line(case.token)}]{one_line(case.after)}"
    room = max(width, _SHORTEST) - len(marked) - 1
    before = one_line(case.before)[-room:] if room > 0 else ""
    return f"…{before}{marked}" if case.before else marked


def _swap(direction: str, experts: Mapping[int, float]) -> str:
    shown = ", ".join(f"{expert} ({change:+.2f})" for expert, change in experts.items())
    return f"{direction} {shown}" if shown else ""


def _cell(text: str, width: int) -> str:
    """Return the token between bars, which make a space at its edge visible."""
    inner = one_line(text)
    inner = inner if len(inner) <= width - 2 else f"{inner[: width - 3]}…"
    return f"|{inner}|".ljust(width)


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
