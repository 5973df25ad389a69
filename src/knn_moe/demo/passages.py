"""Passages of the test text, token by token: what the memory recalled and what it did.

Knows traces and provenance; nothing of how a passage is shown.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from knn_moe.demo.measure import Measured
from knn_moe.demo.result import Passage, PassageToken, RecalledCase
from knn_moe.demo.texts import TestSet
from knn_moe.handle import attach
from knn_moe.memory import RoutingMemory
from knn_moe.trace import LayerTrace, trace

_LENGTH: Final = 128  # tokens of a passage


def pick_passages(
    model: Any, tokenizer: Any, memory: RoutingMemory, test: TestSet, ways: tuple[Measured, ...]
) -> tuple[Passage, ...]:
    """The passages most helped, helped as usual and least helped, from `ways`: alone and with
    the memory."""
    alone, routed = (way.losses.nll[:, : _LENGTH - 1] for way in ways)
    order = (alone - routed).sum(dim=1).argsort(descending=True).tolist()
    places = {
        "The passage that gained most": order[0],
        "A passage in the middle": order[len(order) // 2],
        "The passage that gained least": order[-1],
    }
    reader = _Reader(tokenizer, memory)
    passages = []
    with attach(model, memory) as routing:
        for title, place in places.items():
            ids = test.windows[place, :_LENGTH]
            layers = trace(model, routing, ids[None])
            passages.append(Passage(title, reader.read(ids, alone[place], routed[place], layers)))
    return tuple(passages)


class _Reader:
    """Puts token ids and memory rows into words."""

    def __init__(self, tokenizer: Any, memory: RoutingMemory) -> None:
        self.tokenizer = tokenizer
        self.memory = memory

    def read(
        self, ids: Tensor, alone: Tensor, routed: Tensor, layers: dict[int, LayerTrace]
    ) -> tuple[PassageToken, ...]:
        """Shapes: ids [T]; alone, routed [T - 1], the loss of each token but the first."""
        texts = [self._text([token]) for token in ids.tolist()]
        tokens = [PassageToken(texts[0], None, None, ())]
        for place, (before, after) in enumerate(zip(alone.tolist(), routed.tolist(), strict=True)):
            cases = tuple(self._case(layer, place, found) for layer, found in layers.items())
            tokens.append(PassageToken(texts[place + 1], before, after, cases))
        return tuple(tokens)

    def _case(self, layer: int, place: int, found: LayerTrace) -> RecalledCase:
        """The nearest case of one layer to the token at `place`."""
        ids, at = self.memory.provenance.context(int(found.rows[place, 0]), before=10)
        usual = self.memory.layers[layer].gamma  # 1 / the usual squared distance
        entered, left = found.swapped(place)
        return RecalledCase(
            layer=layer,
            before=self._text(ids[:at]),
            token=self._text(ids[at : at + 1]),
            after=self._text(ids[at + 1 :]),
            distance=float((found.squared_distance[place, 0] * usual).sqrt()),
            confidence=float(found.confidence[place]),
            experts_in=entered,
            experts_out=left,
        )

    def _text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids)
        return text
