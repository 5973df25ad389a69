"""The options that say how a reference set is read, for all commands that read one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from knn_moe.cli.common import print_note

if TYPE_CHECKING:
    from knn_moe.reference.load import ReferenceSet
    from knn_moe.reference.source import Source

F = TypeVar("F", bound=Callable[..., Any])

OPTIONS: Final = ("columns", "split", "file_format")
_ESCAPES: Final = {r"\n": "\n", r"\t": "\t"}


def _parse_columns(
    context: click.Context, option: click.Parameter, given: Sequence[str]
) -> dict[str, str]:
    pairs = [each.partition("=")[::2] for each in given]
    for text, (name, column) in zip(given, pairs, strict=True):
        if not name or not column:
            raise click.UsageError(
                f"--column needs FIELD=COLUMN, for example text=body; got {text!r}."
            )
    found = dict(pairs)
    if len(found) < len(pairs):
        raise click.UsageError(f"--column names a field twice: {' '.join(given)}.")
    return found


def _parse_split(context: click.Context, option: click.Parameter, given: str | None) -> str | None:
    for escape, meant in _ESCAPES.items():
        given = given if given is None else given.replace(escape, meant)
    return given


_columns = click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="FIELD=COLUMN",
    callback=_parse_columns,
    help="Read a field of the examples from this column, for example text=body. Can be repeated.",
)
_split = click.option(
    "--split",
    metavar="[paragraphs|none|SEPARATOR]",
    callback=_parse_split,
    help=r"Split plain text into examples at blank lines (paragraphs), not at all (none), or where "
    r"this text stands, such as --- or \n. Default: paragraphs; prompts to label: \n.",
)
_format = click.option(
    "--format",
    "file_format",
    help="Read a file or standard input as jsonl, json, csv, tsv, parquet, txt or md. Default: as "
    "the ending of its name says.",
)


def reference_options(command: F) -> F:
    """Add --column, --split and --format."""
    return _columns(_split(_format(command)))


def open_source(place: Path, options: Mapping[str, Any], **more: Any) -> Source:
    """Return the source that `place` and the options name; `more` are fields of it."""
    from knn_moe.reference.source import Source

    return Source(place, split=options["split"], format=options["file_format"], **more)


def open_reference(place: Path, options: Mapping[str, Any]) -> ReferenceSet:
    """Return the reference set that `place` and the options name, and say what it holds.

    It is read once to the end, so that what is wrong in it is told before a model is loaded.
    """
    from knn_moe.reference.load import ReferenceSet

    found = ReferenceSet(open_source(place, options), options["columns"])
    for _ in found:
        pass
    print_note(found.source.describe())
    return found
