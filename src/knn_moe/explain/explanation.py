"""What a memory did to each token, as plain values and as JSON.

Knows numbers and text; knows nothing of models or tensors. tables.py makes text of it, page.py a
page, snippet.py what a notebook shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from knn_moe.errors import ConfigError
from knn_moe.explain import tables

_SHOWN: Final = 20  # tokens in a repr


@dataclass(frozen=True, slots=True)
class RecalledCase:
    """A case that a layer recalled for a token."""

    before: str  # the reference text before the case's token
    token: str  # the case's token
    after: str  # the token after it
    distance: float  # 1 is the usual one between neighbours in that layer; cosine: of unit vectors
    weight: float  # its share of the proposal of all recalled cases
    row: int  # in the memory
    example: int  # its number in the reference set
    squared_distance: float  # of the vectors that the similarity compares: see LayerTrace


@dataclass(frozen=True, slots=True)
class LayerEffect:
    """What one layer recalled for one token, and what that changed."""

    layer: int
    confidence: float  # λ
    cases: tuple[RecalledCase, ...]  # at most K, nearest first; empty: none was found
    experts: tuple[int, ...]  # that were used, ascending
    experts_alone: tuple[int, ...]  # that the model alone uses, ascending
    experts_in: Mapping[int, float]  # that the memory brought in here → Δlogit (mixed minus own)
    experts_out: Mapping[int, float]  # that left for them → Δlogit

    @property
    def changed(self) -> bool:
        """Whether the memory changed the layer's experts."""
        return bool(self.experts_in or self.experts_out)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A token that may come next, and its probability."""

    id: int
    text: str  # "" if it is only a part of a character
    alone: float  # probability by the model alone
    with_memory: float

    @property
    def losses(self) -> tuple[float, float]:
        """-log of both probabilities, in nats."""
        return _loss(self.alone), _loss(self.with_memory)


@dataclass(frozen=True)
class ExplainedToken:
    """A token that the model read, what each attached layer recalled, and what it expects next."""

    id: int
    text: str  # the characters that it completes
    effects: tuple[LayerEffect, ...]
    predictions: tuple[
        Prediction, ...
    ] = ()  # the likeliest next tokens, by either; likeliest first
    following: Prediction | None = None  # the token that came next; None: the text ends here

    @property
    def confidence(self) -> float:
        """Mean λ of the layers."""
        return sum(effect.confidence for effect in self.effects) / max(len(self.effects), 1)

    @property
    def changed(self) -> float:
        """The share of layers whose experts changed."""
        return sum(effect.changed for effect in self.effects) / max(len(self.effects), 1)

    @property
    def strongest(self) -> LayerEffect | None:
        """The layer with the largest λ; None if no layer has a memory."""
        return max(self.effects, key=lambda effect: effect.confidence, default=None)


@dataclass(frozen=True, repr=False)
class Explanation:
    """What a memory did to every token of every sequence, without padding."""

    layers: tuple[int, ...]
    sequences: tuple[tuple[ExplainedToken, ...], ...]
    model: str = "the model"  # its name
    memory: str = "a memory"  # its name or description

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
                replace(token, effects=tuple(one for one in token.effects if one.layer in kept))
                for token in sequence
            )
            for sequence in self.sequences
        )
        return replace(self, layers=kept, sequences=sequences)

    def table(self, layer: int | None = None, width: int = tables.WIDTH) -> str:
        """Return one line for each token, of at most `width` columns where that is 60 or more.

        Without `layer`: mean λ, the layers whose experts changed, the nearest case of the layer
        with the largest λ, and the probability of the next token without and with the memory.
        With it: the nearest case, its distance, λ, and the experts that entered and left with
        their Δlogit.
        """
        chosen = self if layer is None else self.only([layer])
        lines: list[str] = []
        for number, sequence in enumerate(chosen.sequences):
            if len(chosen.sequences) > 1:
                lines.append(f"sequence {number + 1} of {len(chosen.sequences)}")
            write = tables.overview if layer is None else tables.details
            lines += write(sequence, width)
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write the explanation as one HTML page, whole or not at all. It needs no network.

        Raises:
            ConfigError: There is no folder to write it to, or `path` is a folder itself.
        """
        from knn_moe.explain.page import render_explanation
        from knn_moe.pages.page import write_page
        from knn_moe.support.files import check_place

        place = Path(path)
        check_place(place)
        write_page(render_explanation(self), place)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the coloured text, and the tokens that changed most."""
        from knn_moe.explain.snippet import render_snippet

        return render_snippet(self)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        tokens, layers = self.tokens, len(self.layers)
        mean = sum(token.confidence for token in tokens) / max(len(tokens), 1)
        head = f"Explanation({len(tokens):,} tokens × {layers} layers, mean λ {mean:.2f})"
        lines = list(tables.overview(tokens[:_SHOWN], tables.WIDTH)) if tokens and layers else []
        if lines and len(tokens) > _SHOWN:
            lines.append(f"… {len(tokens) - _SHOWN:,} more tokens: print it, or use its table()")
        return "\n".join([head, *lines])


def _loss(probability: float) -> float:
    return -math.log(probability) if probability != 0 else math.inf


def _as_json(token: ExplainedToken) -> dict[str, Any]:
    effects = [{**asdict(effect), "changed": effect.changed} for effect in token.effects]
    following = None if token.following is None else asdict(token.following)
    facts: dict[str, Any] = _finite(
        {
            "id": token.id,
            "text": token.text,
            "mean_confidence": token.confidence,
            "changed": token.changed,
            "following": following,
            "predictions": [asdict(one) for one in token.predictions],
            "effects": effects,
        }
    )
    return facts


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
