"""The demo's text: Python's own documentation, or files of one's own; windows and choices of it.

Knows examples and tokens; nothing of models.
"""

from __future__ import annotations

import pydoc_data.topics
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from knn_moe.errors import ReferenceSetError
from knn_moe.reference.examples import Example, load_examples, tokenise

CHOICES: Final = 4
_CONTEXT: Final = 48  # tokens before a choice
_CONTINUATION: Final = 12  # tokens of each thing to choose from
_PIECE: Final = 1500  # characters of a reference text read together


@dataclass(frozen=True)
class DemoText:
    """What the memory is made from, what it is tried on, and both in words."""

    reference: list[Example]
    test: list[Example]
    reference_name: str
    test_name: str


@dataclass(frozen=True)
class TestSet:
    """Token ids to be tried on. Shapes: windows [W, L]; contexts [C, c]; continuations
    [C, 4, n], the true one at `answers` [C]."""

    __test__ = False  # pytest: this is no test case

    windows: Tensor
    contexts: Tensor
    continuations: Tensor
    answers: Tensor = field(repr=False)


def documentation(seed: int = 0) -> DemoText:
    """Python's help topics, each wholly in the reference or wholly in the test."""
    topics = [Example.of(text) for _, text in sorted(pydoc_data.topics.topics.items())]
    random.Random(seed).shuffle(topics)
    half = len(topics) // 2
    test = topics[half:]
    reference = apart(topics[:half], test)
    return DemoText(
        reference=reference,
        test=test,
        reference_name=f"{len(reference)} topics of Python's documentation",
        test_name=f"{len(test)} other topics of Python's documentation",
    )


def own_text(reference: Path, test: Path) -> DemoText:
    examples = load_examples(test)
    remembered = apart(load_examples(reference), examples)
    if not remembered:
        raise ReferenceSetError(
            f"All of {str(reference)!r} is in {str(test)!r} too: what is tried must not be what is "
            f"remembered."
        )
    return DemoText(remembered, examples, repr(reference.name), repr(test.name))


def apart(reference: Sequence[Example], test: Sequence[Example]) -> list[Example]:
    """The reference less what the test has too: whole examples, and paragraphs of plain texts.

    Without this a memory would be praised for knowing the test by heart. Topics of Python's
    documentation share paragraphs, and two are the same text.
    """
    known = {_words(paragraph) for example in test for paragraph in _paragraphs(example)}
    kept = []
    for example in reference:
        if _is_plain(example):
            left = [part for part in _paragraphs(example) if _words(part) not in known]
            if any(part.strip() for part in left):
                kept.append(Example(completion="\n\n".join(left)))
        elif example not in test:
            kept.append(example)
    return kept


def _is_plain(example: Example) -> bool:
    return not example.prompt and example.messages is None


def _paragraphs(example: Example) -> list[str]:
    return example.completion.split("\n\n") if _is_plain(example) else []


def _words(paragraph: str) -> str:
    return " ".join(paragraph.split())


def sample_reference(examples: Sequence[Example], tokenizer: Any, tokens: int) -> list[Example]:
    """Pieces of all examples in turn, until they hold about `tokens` together.

    A piece of each before a second of any: a few long texts should not fill the memory.
    """
    pieces = [_pieces(example) for example in examples]
    chosen: list[Example] = []
    held = 0
    for turn in range(max(map(len, pieces), default=0)):
        for part in pieces:
            if turn < len(part) and held < tokens:
                chosen.append(part[turn])
                held += len(tokenise(part[turn], tokenizer).ids)
    return chosen


def _pieces(example: Example) -> list[Example]:
    """A plain text in paragraphs put together to some size; anything else whole."""
    if not _is_plain(example):
        return [example]
    pieces = [""]
    for paragraph in _paragraphs(example):
        for start in range(0, max(len(paragraph), 1), _PIECE):
            part = paragraph[start : start + _PIECE]
            if len(pieces[-1]) + len(part) > _PIECE and pieces[-1]:
                pieces.append("")
            pieces[-1] += part
        pieces[-1] += "\n\n"
    return [Example(completion=piece) for piece in pieces]


def make_test_set(
    examples: Sequence[Example], tokenizer: Any, length: int, windows: int, choices: int
) -> TestSet:
    """Windows to predict, and continuations to choose from, spread evenly over the text."""
    stream = _stream(examples, tokenizer)
    needed = max(2 * length, CHOICES * (_CONTEXT + _CONTINUATION))
    if len(stream) < needed:
        raise ReferenceSetError(
            f"The test text has {len(stream):,} tokens; the demo needs at least {needed:,}."
        )
    spans = _cut(stream, _CONTEXT + _CONTINUATION, choices)
    contexts, endings = spans[:, :_CONTEXT], spans[:, _CONTEXT:]
    draw = torch.Generator().manual_seed(0)
    answers = torch.randint(CHOICES, (len(spans),), generator=draw)
    continuations = torch.empty(len(spans), CHOICES, _CONTINUATION, dtype=torch.int64)
    for item, answer in enumerate(answers.tolist()):
        others = torch.randperm(len(spans) - 1, generator=draw)[: CHOICES - 1]
        others += others >= item  # any but its own
        continuations[item, torch.arange(CHOICES) != answer] = endings[others]
        continuations[item, answer] = endings[item]
    return TestSet(_cut(stream, length, windows), contexts, continuations, answers)


def _stream(examples: Sequence[Example], tokenizer: Any) -> Tensor:
    """All tokens, examples apart from each other by the end-of-text token if there is one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = [token for example in examples for token in [*tokenise(example, tokenizer).ids, *end]]
    return torch.tensor(ids)


def _cut(stream: Tensor, length: int, count: int) -> Tensor:
    """At most `count` windows, spread evenly. Shape [count, length]."""
    whole = stream[: len(stream) // length * length].view(-1, length)
    if len(whole) <= count:
        return whole
    return whole[torch.linspace(0, len(whole) - 1, count).round().long()]
