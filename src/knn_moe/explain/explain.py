"""Turn the trace of a text into its explanation: token ids and rows of a memory become text.

Knows traces, provenance and tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from knn_moe.errors import ConfigError
from knn_moe.explain.explanation import (
    ExplainedToken,
    Explanation,
    LayerEffect,
    Prediction,
    RecalledCase,
)
from knn_moe.explain.trace import Attached, LayerTrace, NextTokens, TwoRuns, trace_both
from knn_moe.reference.provenance import Provenance
from knn_moe.support.characters import character_pieces

_TORN: Final = "\N{REPLACEMENT CHARACTER}"
_BEFORE: Final = 10  # tokens of a case's text that are shown before its own
_CONTEXT: Final = 4  # tokens before a predicted one that its characters may depend on


class Describer:
    """Put token ids and rows of a memory into words; without a tokenizer, into numbers.

    Args:
        provenance: Where the memory's cases come from.
        gammas: γ of each layer by its own keys: 1 / the usual squared distance of neighbours.
        tokenizer: The model's, or None.
        cases: Whether recalled cases are described, which takes most of the time.
    """

    def __init__(
        self,
        provenance: Provenance,
        gammas: Mapping[int, float],
        tokenizer: Any,
        *,
        cases: bool = True,
    ) -> None:
        self.provenance = provenance
        self.gammas = gammas
        self.tokenizer = tokenizer
        self.tells_cases = cases
        self._cases: dict[int, tuple[str, str, str, int]] = {}

    def describe_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the characters that each token completes, or its number."""
        if self.tokenizer is None:
            return [f" {token}" for token in ids]
        return character_pieces(self.tokenizer, ids)

    def describe_predictions(
        self, ids: Sequence[int], next_tokens: NextTokens, place: int, *, known: bool
    ) -> tuple[tuple[Prediction, ...], Prediction | None]:
        """Return the likeliest tokens after `ids`, likeliest first, and the one that came next.

        Args:
            ids: The tokens that were read.
            next_tokens: What was predicted.
            place: The row of `next_tokens` after the last of `ids`.
            known: Whether the token is known that came next.
        """
        columns = (next_tokens.tokens, next_tokens.alone, next_tokens.with_memory)
        rows = list(zip(*(column[place].tolist() for column in columns), strict=True))
        found = {
            token: Prediction(token, self._describe_next(ids, token), alone, with_memory)
            for token, alone, with_memory in rows
        }
        likeliest = {token: found[token] for token, *_ in rows[1:]}
        ranked = sorted(likeliest.values(), key=lambda one: -max(one.with_memory, one.alone))
        return tuple(ranked), found[rows[0][0]] if known else None

    def _describe_next(self, ids: Sequence[int], token: int) -> str:
        """Return the characters that `token` would complete after `ids`: "" if none.

        It may also break off a character that `ids` began.
        """
        return self.describe_tokens([*ids[-_CONTEXT:], token])[-1].strip(_TORN)

    def describe_layer(
        self, layer: int, found: LayerTrace, alone: Tensor, first: int
    ) -> Iterator[LayerEffect]:
        """Yield what a layer did to each token from `first` on.

        Args:
            layer: The layer.
            found: Its trace.
            alone: The experts that the model alone chose. Shape [T, top_k].
            first: The first token.
        """
        rows, squares, weights = (
            column[first:].tolist() for column in (found.rows, found.squared_distance, found.weight)
        )
        confidences, used, others = (
            column[first:].tolist() for column in (found.confidence, found.after, alone)
        )
        for place, confidence in enumerate(confidences):
            entered, left = (
                {expert: float(found.change[first + place, expert]) for expert in experts}
                for experts in found.swapped(first + place)
            )
            all_cases = zip(rows[place], squares[place], weights[place], strict=True)
            recalled = all_cases if self.tells_cases else ()
            yield LayerEffect(
                layer=layer,
                confidence=confidence,
                cases=tuple(
                    self._describe_case(layer, *case) for case in recalled if case[1] < math.inf
                ),
                experts=tuple(used[place]),
                experts_alone=tuple(others[place]),
                experts_in=entered,
                experts_out=left,
            )

    def _describe_case(self, layer: int, row: int, squared: float, weight: float) -> RecalledCase:
        before, token, after, example = self._read_case(row)
        return RecalledCase(
            before=before,
            token=token,
            after=after,
            distance=math.sqrt(squared * self.gammas[layer]),
            weight=weight,
            row=row,
            example=example,
            squared_distance=squared,
        )

    def _read_case(self, row: int) -> tuple[str, str, str, int]:
        """Return the text of a case before, at and after its token, and its example."""
        if row not in self._cases:
            ids, at = self.provenance.context(row, before=_BEFORE)
            pieces = self.describe_tokens(ids)
            before, token, after = (
                "".join(part) for part in (pieces[:at], pieces[at : at + 1], pieces[at + 1 :])
            )
            example = self.provenance.example_at(row)
            # The context may begin and end inside a character.
            self._cases[row] = (before.lstrip(_TORN), token, after.rstrip(_TORN), example)
        return self._cases[row]


def explain_sequences(
    model: nn.Module,
    routing: Attached,
    sequences: Sequence[Tensor],
    describer: Describer,
    last: int | None = None,
) -> Explanation:
    """Run the model on each sequence and explain what its memory did to the tokens.

    Args:
        model: The model that `routing` is attached to.
        routing: The handle of the attached memory.
        sequences: Token ids without padding. Shape [n] each.
        describer: Puts tokens and cases into words.
        last: Explain only so many tokens at the end of each sequence; None: all.
    """
    layers = tuple(routing.stats())
    explained = tuple(
        _explain_sequence(model, routing, ids, describer, last) if len(ids) else ()
        for ids in sequences
    )
    return Explanation(layers, explained)


def _explain_sequence(
    model: nn.Module, routing: Attached, ids: Tensor, describer: Describer, last: int | None
) -> tuple[ExplainedToken, ...]:
    first = 0 if last is None else max(len(ids) - last, 0)
    runs = trace_both(model, routing, ids, first)
    return describe_runs(runs, ids.tolist(), describer, first)


def describe_runs(
    runs: TwoRuns, read: list[int], describer: Describer, first: int = 0
) -> tuple[ExplainedToken, ...]:
    """Put into words what a memory did to the tokens from `first` on.

    Args:
        runs: What `trace_both` found, for the same `first`.
        read: The token ids that the model read.
        describer: Puts tokens and cases into words.
        first: The first token to explain.
    """
    texts = describer.describe_tokens(read)
    layers = [
        list(describer.describe_layer(layer, found, runs.experts_alone[layer], first))
        for layer, found in runs.layers.items()
    ]
    tokens = []
    for place, position in enumerate(range(first, len(read))):
        effects = tuple(effects[place] for effects in layers)
        predictions: tuple[Prediction, ...] = ()
        following = None
        if runs.next_tokens is not None:
            predictions, following = describer.describe_predictions(
                read[: position + 1], runs.next_tokens, place, known=position + 1 < len(read)
            )
        token = ExplainedToken(read[position], texts[position], effects, predictions, following)
        tokens.append(token)
    return tuple(tokens)


def split_sequences(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
    """Return the tokens of each row without padding.

    Shapes: input_ids, attention_mask [T] or [B, T]. Result [n] each.

    Raises:
        ConfigError: `input_ids` are not token ids, or the mask has another shape.
    """
    whole = isinstance(input_ids, Tensor) and not input_ids.dtype.is_floating_point
    if not whole or input_ids.ndim not in (1, 2) or not input_ids.numel():
        seen = list(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ConfigError(f"explain takes token ids [T] or [B, T], or a text, got {seen}.")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if mask.shape != input_ids.shape:
        raise ConfigError(
            f"attention_mask must have the token ids' shape {list(input_ids.shape)}, got "
            f"{list(mask.shape)}."
        )
    rows, real = (part.cpu().reshape(-1, input_ids.shape[-1]) for part in (input_ids, mask))
    return [row[kept] for row, kept in zip(rows, real.bool(), strict=True)]


def tokenize(text: str, tokenizer: Any) -> Tensor:
    """Return the token ids of a text, as `tokenizer(text)` gives them. Shape [T].

    Raises:
        ConfigError: There is no tokenizer.
    """
    if tokenizer is None:
        raise ConfigError("A text needs its tokenizer: explain(text, tokenizer=tokenizer).")
    return torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64)
