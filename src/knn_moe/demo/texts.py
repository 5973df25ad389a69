"""Choose the demo's text, Python's own documentation or the user's files, and make a task of it.

Knows examples, tokenizers and tasks; nothing of models.
"""

from __future__ import annotations

import pydoc_data.topics
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from knn_moe.errors import ReferenceSetError
from knn_moe.reference.examples import Example, tokenise
from knn_moe.reference.files import WHOLE
from knn_moe.reference.load import ReferenceSet
from knn_moe.reference.source import Source
from knn_moe.tasks import Task, TaskData, Text
from knn_moe.tasks.task import Row

TASK: Final = "demo"
_PIECE: Final = 1500  # characters of a reference text that are read together


@dataclass(frozen=True)
class DemoText:
    """The reference set, the test set, and a description of each."""

    reference: list[Example]
    test: list[Example]
    reference_name: str
    test_name: str


def load_documentation(seed: int = 0) -> DemoText:
    """Split Python's help topics at random into a reference set and a test set."""
    topics = [Example.of(text) for _, text in sorted(pydoc_data.topics.topics.items())]
    random.Random(seed).shuffle(topics)
    half = len(topics) // 2
    test = topics[half:]
    reference = remove_overlap(topics[:half], test)
    return DemoText(
        reference,
        test,
        reference_name=f"{len(reference)} topics of Python's documentation",
        test_name=f"{len(test)} other topics of Python's documentation",
    )


def read_files(reference: Path, test: Path) -> DemoText:
    """Read the user's own reference set and test set.

    Raises:
        ReferenceSetError: A file cannot be read, or the test set holds all of the reference set.
    """
    examples, listed = _read_whole(test), _read_whole(reference)
    kept = remove_overlap(listed, examples)
    if not kept:
        raise ReferenceSetError(
            f"Everything in {str(reference)!r} is in {str(test)!r} as well. "
            f"The test text must differ from the reference text."
        )
    return DemoText(kept, examples, repr(reference.name), repr(test.name))


def _read_whole(path: Path) -> list[Example]:
    """Return examples; a text stays whole, because paragraphs follow one another in the test."""
    return list(ReferenceSet(Source(path, default_split=WHOLE)))


def remove_overlap(reference: Sequence[Example], test: Sequence[Example]) -> list[Example]:
    """Return the reference set without the examples and paragraphs that the test set has too.

    A memory would otherwise score well for knowing the test by heart: topics of Python's
    documentation share paragraphs, and two of them are the same text. Plain texts are compared
    paragraph by paragraph, other examples as a whole.
    """
    known = {_normalise(paragraph) for example in test for paragraph in _paragraphs(example)}
    kept = []
    for example in reference:
        if _is_plain(example):
            left = [part for part in _paragraphs(example) if _normalise(part) not in known]
            if any(part.strip() for part in left):
                kept.append(Example(completion="\n\n".join(left)))
        elif example not in test:
            kept.append(example)
    return kept


def _is_plain(example: Example) -> bool:
    return not example.prompt and example.messages is None


def _paragraphs(example: Example) -> list[str]:
    return example.completion.split("\n\n") if _is_plain(example) else []


def _normalise(paragraph: str) -> str:
    return " ".join(paragraph.split())


def sample_reference(examples: Sequence[Example], tokenizer: Any, tokens: int) -> list[Example]:
    """Return pieces of all examples in turn until they hold about `tokens` tokens together.

    One piece of every example comes before the second piece of any: a few long texts should not
    fill the memory.
    """
    pieces = [_split(example) for example in examples]
    chosen: list[Example] = []
    held = 0
    for turn in range(max(map(len, pieces), default=0)):
        for part in pieces:
            if turn < len(part) and held < tokens:
                chosen.append(part[turn])
                held += len(tokenise(part[turn], tokenizer).ids)
    return chosen


def _split(example: Example) -> list[Example]:
    """Split a plain text between paragraphs into pieces; leave any other example whole."""
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


def make_task(text: DemoText, tokenizer: Any) -> TaskData:
    """Make a task of the test set: predict every token of windows of it."""
    task = Task(name=TASK, title=text.test_name, kind=Text(), files=TASK)
    rows: list[Row] = [{"text": _as_text(example, tokenizer)} for example in text.test]
    return TaskData(task, rows, [], text.test_name)


def _as_text(example: Example, tokenizer: Any) -> str:
    if example.messages is None:
        return example.prompt + example.completion
    return str(tokenizer.decode(tokenise(example, tokenizer).ids))
