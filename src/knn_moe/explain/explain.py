"""Turn the trace of a text into its explanation: token ids and rows of a memory become text.

Knows traces, provenance and tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from knn_moe.errors import ConfigError
from knn_moe.explain.explanation import ExplainedToken, Explanation, RecalledCase
from knn_moe.explain.trace import Attached, LayerTrace, trace
from knn_moe.reference.provenance import Provenance
from knn_moe.support.characters import character_pieces

_TORN: Final = "\N{REPLACEMENT CHARACTER}"
_BEFORE: Final = 10  # tokens of a case's text that are shown before its own


class Describer:
    """Put token ids and rows of a memory into words; without a tokenizer, into numbers.

    Args:
        provenance: Where the memory's cases come from.
        gammas: γ of each layer by its own keys: 1 / the usual squared distance of neighbours.
        tokenizer: The model's, or None.
    """

    def __init__(self, provenance: Provenance, gammas: Mapping[int, float], tokenizer: Any) -> None:
        self.provenance = provenance
        self.gammas = gammas
        self.tokenizer = tokenizer
        self._cases: dict[int, tuple[str, str, str]] = {}

    def describe_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the characters that each token completes, or its number."""
        if self.tokenizer is None:
            return [f" {token}" for token in ids]
        return character_pieces(self.tokenizer, ids)

    def describe_case(self, layer: int, position: int, found: LayerTrace) -> RecalledCase:
        """Return the nearest case that `layer` recalled for the token at `position`."""
        squared = float(found.squared_distance[position, 0])
        row = int(found.rows[position, 0]) if math.isfinite(squared) else None
        before, token, after = ("", "", "") if row is None else self._read_case(row)
        entered, left = (
            {expert: float(found.change[position, expert]) for expert in experts}
            for experts in found.swapped(position)
        )
        return RecalledCase(
            layer=layer,
            before=before,
            token=token,
            after=after,
            distance=math.sqrt(squared * self.gammas[layer]),
            confidence=float(found.confidence[position]),
            experts_in=entered,
            experts_out=left,
            weight=float(found.weight[position, 0]),
            row=row,
            example=None if row is None else self.provenance.example_at(row),
            squared_distance=squared,
        )

    def _read_case(self, row: int) -> tuple[str, str, str]:
        """Return the text of a case before, at and after its token."""
        if row not in self._cases:
            ids, at = self.provenance.context(row, before=_BEFORE)
            pieces = self.describe_tokens(ids)
            before, token, after = (
                "".join(part) for part in (pieces[:at], pieces[at : at + 1], pieces[at + 1 :])
            )
            # The context may begin and end inside a character.
            self._cases[row] = (before.lstrip(_TORN), token, after.rstrip(_TORN))
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
    explained = []
    for ids in sequences:
        layers = trace(model, routing, ids[None]) if len(ids) else {}
        texts = describer.describe_tokens(ids.tolist())
        first = 0 if last is None else max(len(ids) - last, 0)
        explained.append(
            tuple(
                ExplainedToken(
                    int(ids[position]),
                    texts[position],
                    tuple(
                        describer.describe_case(layer, position, found)
                        for layer, found in layers.items()
                    ),
                )
                for position in range(first, len(ids))
            )
        )
    return Explanation(tuple(routing.stats()), tuple(explained))


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
