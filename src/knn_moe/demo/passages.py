"""Passages of the test text, token by token: what the memory recalled and what it did.

Knows traces and provenance; nothing of how a passage is shown.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from knn_moe.demo.measure import Measured
from knn_moe.demo.result import Passage, PassageToken
from knn_moe.demo.texts import TestSet
from knn_moe.explain.explain import Reader
from knn_moe.explain.trace import LayerTrace, trace
from knn_moe.inference.attach import attach
from knn_moe.memory.memory import RoutingMemory

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
    usual = {index: layer.gamma for index, layer in memory.layers.items()}
    reader = Reader(memory.provenance, usual, tokenizer)
    passages = []
    with attach(model, memory) as routing:
        for title, place in places.items():
            ids = test.windows[place, :_LENGTH]
            layers = trace(model, routing, ids[None])
            tokens = _tokens(reader, ids, alone[place], routed[place], layers)
            passages.append(Passage(title, tokens))
    return tuple(passages)


def _tokens(
    reader: Reader, ids: Tensor, alone: Tensor, routed: Tensor, layers: dict[int, LayerTrace]
) -> tuple[PassageToken, ...]:
    """Shapes: ids [T]; alone, routed [T - 1], the loss of each token but the first."""
    first, *others = reader.texts(ids.tolist())
    tokens = [PassageToken(first, None, None, ())]
    losses = zip(others, alone.tolist(), routed.tolist(), strict=True)
    for place, (text, before, after) in enumerate(losses):
        cases = tuple(reader.case(layer, place, found) for layer, found in layers.items())
        tokens.append(PassageToken(text, before, after, cases))
    return tuple(tokens)
