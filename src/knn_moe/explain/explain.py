"""From the trace of a text to its explanation: token ids and rows of a memory in words.

Knows traces, provenance and tokenizers. Which text it is, and whose memory, the handle knows.
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

_BEFORE: Final = 10  # tokens of a case's text shown before its own


class Reader:
    """Puts token ids and memory rows into words; without a tokenizer, into numbers.

    `usual`: of each layer, γ by its own keys: 1 / the usual squared distance between neighbours.
    """

    def __init__(self, provenance: Provenance, usual: Mapping[int, float], tokenizer: Any) -> None:
        self.provenance = provenance
        self.usual = usual
        self.tokenizer = tokenizer
        self._cases: dict[int, tuple[str, str, str]] = {}

    def texts(self, ids: Sequence[int]) -> list[str]:
        """What each token says."""
        return [
            self._text(ids[max(place - 1, 0) : place], ids[place : place + 1])
            for place in range(len(ids))
        ]

    def case(self, layer: int, place: int, found: LayerTrace) -> RecalledCase:
        """The nearest case of one layer to the token at `place`."""
        squared = float(found.squared_distance[place, 0])
        row = int(found.rows[place, 0]) if math.isfinite(squared) else None
        before, token, after = ("", "", "") if row is None else self._case(row)
        entered, left = (
            {expert: float(found.change[place, expert]) for expert in experts}
            for experts in found.swapped(place)
        )
        return RecalledCase(
            layer=layer,
            before=before,
            token=token,
            after=after,
            distance=math.sqrt(squared * self.usual[layer]),
            confidence=float(found.confidence[place]),
            experts_in=entered,
            experts_out=left,
            weight=float(found.weight[place, 0]),
            row=row,
            example=None if row is None else self.provenance.example_at(row),
            squared_distance=squared,
        )

    def _case(self, row: int) -> tuple[str, str, str]:
        """The text of a case before, at and after its token."""
        if row not in self._cases:
            ids, at = self.provenance.context(row, before=_BEFORE)
            before, token, after = ids[:at], ids[at : at + 1], ids[at + 1 :]
            self._cases[row] = (
                self._text([], before),
                self._text(before, token),
                self._text([*before, *token], after),
            )
        return self._cases[row]

    def _text(self, context: Sequence[int], ids: Sequence[int]) -> str:
        """What `ids` say behind `context`: some tokenizers drop the space a text begins with."""
        if self.tokenizer is None:
            return "".join(f" {token}" for token in ids)
        start, whole = self._decode(context), self._decode([*context, *ids])
        cut = start.endswith("\N{REPLACEMENT CHARACTER}")  # within a character
        return self._decode(ids) if cut or not whole.startswith(start) else whole[len(start) :]

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids)) if ids else ""
        return text


def explain_sequences(
    model: nn.Module,
    routing: Attached,
    sequences: Sequence[Tensor],
    reader: Reader,
    last: int | None = None,
) -> Explanation:
    """Let the model read each sequence once, and say what its memory did to the `last` tokens of
    it, or to all. Shapes: sequences [n] each, every token real."""
    explained = []
    for ids in sequences:
        layers = trace(model, routing, ids[None]) if len(ids) else {}
        texts = reader.texts(ids.tolist())
        first = 0 if last is None else max(len(ids) - last, 0)
        explained.append(
            tuple(
                ExplainedToken(
                    int(ids[place]),
                    texts[place],
                    tuple(reader.case(layer, place, found) for layer, found in layers.items()),
                )
                for place in range(first, len(ids))
            )
        )
    return Explanation(tuple(routing.stats()), tuple(explained))


def sequences_of(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
    """The real tokens of each row. Shapes: input_ids, attention_mask [T] or [B, T] → [n] each."""
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


def read_text(text: str, tokenizer: Any) -> Tensor:
    """The token ids of a text, nothing added. Shape [T]."""
    if tokenizer is None:
        raise ConfigError("A text needs its tokenizer: explain(text, tokenizer=tokenizer).")
    return torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64)
