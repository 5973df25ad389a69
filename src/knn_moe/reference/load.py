"""Load a reference set: the examples of a file, a folder, a data set, a table or a list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from knn_moe.errors import ReferenceSetError
from knn_moe.reference.examples import Example
from knn_moe.reference.forms import check_columns
from knn_moe.reference.source import Source
from knn_moe.support.characters import half_of_character

# A name, or anything that holds rows: a list, a DataFrame, a Dataset.
Examples: TypeAlias = str | Path | Iterable[Any]


class ReferenceSet(Iterable[Example]):
    """The examples of a source, which are read anew each time: a large file is never held whole."""

    def __init__(self, source: Source, columns: Mapping[str, str] | None = None) -> None:
        self.source = source
        check_columns(columns or {})
        self.columns = dict(columns or {})

    def __iter__(self) -> Iterator[Example]:
        for place, value in self.source.items():
            try:
                example = Example.of(value, self.columns)
                check_characters(_texts(example))
            except ReferenceSetError as error:
                raise ReferenceSetError(f"{place}: {error}.") from None
            yield example


def _texts(example: Example) -> Iterator[object]:
    yield from (example.prompt, example.completion, *example.distractors)
    yield from (message["content"] for message in example.messages or ())


def check_characters(texts: Iterable[object]) -> None:
    """Refuse halves of characters, which JSON can hold and tokenizers cannot read.

    Raises:
        ReferenceSetError: There is one; the message is the end of a sentence.
    """
    for text in texts:
        half = half_of_character(text) if isinstance(text, str) else None
        if half is not None:
            raise ReferenceSetError(
                f"has half of a character, {half!r}, as of a text that was cut between its bytes"
            )


def load_examples(
    source: Examples,
    *,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    format: str | None = None,
) -> list[Example]:
    """Load examples from a file, a folder, a data set, a table or a list.

    Args:
        source: A name: a .jsonl, .json, .csv, .tsv, .parquet, .txt or .md file (all but .parquet
            also .gz), a folder of them, "-" for standard input, or a data set of the hub as
            ORG/NAME, ORG/NAME:SPLIT or ORG/NAME:CONFIG:SPLIT. Or what holds the rows: a pandas or
            polars DataFrame, a pyarrow table, a `datasets.Dataset`, or an iterable of texts,
            mappings, chat messages or examples. A string is always a name: a text is given in a
            list.
        columns: The column that each field of a form is in, for example {"text": "body"}.
        split: How plain text is split into examples: "paragraphs" (the default, at blank lines),
            "none" (each file is one text), or the text that stands between two examples.
        format: What a file or standard input holds, for example "csv". None: as its ending says.

    Returns:
        The examples, in their order.

    Raises:
        ReferenceSetError: They cannot be read, or one is not in a known form.
        MissingDependencyError: They need a package that is not installed.
    """
    return list(iter_examples(source, columns=columns, split=split, format=format))


def iter_examples(
    source: Examples,
    *,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    format: str | None = None,
) -> Iterator[Example]:
    """Yield the examples of `load_examples` one at a time."""
    return iter(ReferenceSet(Source(source, split=split, format=format), columns))
