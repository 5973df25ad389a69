"""Files of rows or of text: what they hold, item by item, and where each item was found.

Knows file formats and encodings; nothing of what a row means. Files are read as a stream, but for
.json and for text that is not split into paragraphs.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TextIO, cast

from knn_moe.errors import MissingDependencyError, ReferenceSetError

FORMATS: Final = ("jsonl", "json", "csv", "tsv", "parquet", "txt", "md")
TEXT: Final = ("txt", "md")
STDIN: Final = "-"
PARAGRAPHS: Final = "paragraphs"
WHOLE: Final = "none"
ENDINGS: Final = ", ".join(f".{name}" for name in FORMATS)

# The longest first: UTF-32's mark begins with that of UTF-16.
_MARKS: Final = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_LISTS: Final = ("data", "examples", "rows")  # what an object in a .json file calls its rows


class Item(NamedTuple):
    """What a file holds in one place, and the name of this place."""

    place: str
    value: Any


@dataclass(frozen=True)
class DataFile:
    """A file, or standard input, that can be read more than once."""

    name: str
    format: str
    open: Callable[[], BinaryIO]
    guessed: bool = False  # whether only its first characters say which format it has


def find_format(path: Path) -> str | None:
    """Return the format that the ending of a file's name says, or None."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        suffix = Path(path.stem).suffix.lower()
        if suffix == ".parquet":  # it is compressed in itself
            return None
    return suffix[1:] if suffix[1:] in FORMATS else None


def open_file(path: Path, given: str | None = None) -> DataFile:
    """Return the file at `path`, in the format `given` or in the one its ending says.

    Raises:
        ReferenceSetError: The format is not known, or a pipe cannot be read.
    """
    if not path.is_file():  # a pipe, as of <(command)
        try:
            return _hold(str(path), path.read_bytes(), given)
        except OSError as error:
            raise ReferenceSetError(f"Cannot read {str(path)!r}: {error}.") from None
    found = given or find_format(path)
    if found is None:
        raise ReferenceSetError(
            f"Cannot tell what {str(path)!r} holds. Known endings: {ENDINGS}; all but .parquet may "
            f"be followed by .gz. Or name its format with --format."
        )

    def read() -> BinaryIO:
        return cast(BinaryIO, gzip.open(path)) if is_packed else path.open("rb")

    is_packed = path.suffix.lower() == ".gz"
    return DataFile(str(path), found, read)


def open_stdin(given: str | None = None) -> DataFile:
    """Read standard input to its end and return it as a file."""
    return _hold("standard input", sys.stdin.buffer.read(), given)


def _hold(name: str, data: bytes, given: str | None) -> DataFile:
    """Keep in memory what can be read only once.

    Without a format it is taken for JSON if it begins with "{" or "[", and else for text.
    """
    return DataFile(name, given or _guess_format(data), lambda: io.BytesIO(data), not given)


def _guess_format(data: bytes) -> str:
    if data.startswith(b"PAR1"):
        return "parquet"
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    start = data[: 1 << 16].decode(encoding, errors="replace").lstrip()
    return "json" if start.startswith(("{", "[")) else "txt"  # JSON lines are read as .json too


def read_file(file: DataFile, split: str = PARAGRAPHS) -> Iterator[Item]:
    """Yield what a file holds: rows, or texts.

    Args:
        split: How text is split: "paragraphs", "none", or at each place with this text.

    Raises:
        ReferenceSetError: The file cannot be read, or holds nothing.
        MissingDependencyError: Its format needs a package that is not installed.
    """
    empty = True
    for item in _read_text(file, split) if file.format in TEXT else _READERS[file.format](file):
        empty = False
        yield item
    if empty:
        raise ReferenceSetError(f"{file.name!r} is empty: it has no rows and no text.")


@contextmanager
def _open_text(file: DataFile, newline: str | None = None) -> Iterator[TextIO]:
    """Open a file as text, by its byte order mark or else as UTF-8.

    Raises:
        ReferenceSetError: It cannot be read; a wrong byte is named with its line.
    """
    encoding = "utf-8"
    try:
        with io.BufferedReader(file.open()) as data:  # type: ignore[type-var]
            start = data.peek(4)[:4]
            encoding = next((name for mark, name in _MARKS if start.startswith(mark)), encoding)
            with io.TextIOWrapper(data, encoding=encoding, newline=newline) as text:
                yield text
    except UnicodeDecodeError as error:
        # Text is decoded in large pieces, so the error itself does not know the line.
        raise ReferenceSetError(
            f"{file.name}, line {_find_wrong_line(file, encoding)}: cannot be decoded as "
            f"{error.encoding} ({error.reason}). Save the file as UTF-8."
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise _cannot_read(file, error) from None


def _find_wrong_line(file: DataFile, encoding: str) -> int:
    decoder = codecs.getincrementaldecoder(encoding)()
    line = 1
    with file.open() as data:
        while True:
            part = data.read(1 << 16)
            try:
                line += decoder.decode(part, final=not part).count("\n")
            except UnicodeDecodeError as error:
                before = error.object[: error.start]
                return line + before.decode(error.encoding, errors="ignore").count("\n")
            if not part:
                return line


def _cannot_read(file: DataFile, error: Exception) -> ReferenceSetError:
    return ReferenceSetError(f"Cannot read {file.name!r}: {error}.")


def _read_text(file: DataFile, split: str) -> Iterator[Item]:
    with _open_text(file) as text:
        if split == PARAGRAPHS:
            pieces = _split_paragraphs(text)
        else:
            pieces = iter([text.read()] if split == WHOLE else text.read().split(split))
        number = 0
        for piece in pieces:
            if piece.strip():
                number += 1
                kept = piece if split == WHOLE else piece.strip("\n")
                yield Item(f"{file.name}, text {number}", kept)


def _split_paragraphs(lines: TextIO) -> Iterator[str]:
    """Yield the lines between blank lines."""
    paragraph: list[str] = []
    for line in lines:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield "".join(paragraph)
            paragraph.clear()
    yield "".join(paragraph)


def _read_json_lines(file: DataFile) -> Iterator[Item]:
    with _open_text(file) as text:
        yield from _parse_lines(file, text)


def _parse_lines(file: DataFile, lines: TextIO) -> Iterator[Item]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{file.name}, line {number}"
            try:
                yield Item(place, json.loads(line))
            except (ValueError, RecursionError) as error:
                raise _not_json(file, place, _reason(error)) from None


def _reason(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _not_json(file: DataFile, place: str, reason: str) -> ReferenceSetError:
    hint = " If it is text, say so: --format txt." if file.guessed else ""
    return ReferenceSetError(f"{place}: not JSON ({reason}).{hint}")


def _read_json(file: DataFile) -> Iterator[Item]:
    """Yield the rows of a list, or of an object that has such a list; or those of JSON lines."""
    with _open_text(file) as text:
        whole = text.read()
    if not whole.strip():
        return
    try:
        found = json.loads(whole)
    except (ValueError, RecursionError) as error:
        reason = _reason(error)
        if reason == "Extra data":  # after the first of several lines
            yield from _parse_lines(file, io.StringIO(whole))
            return
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise _not_json(file, f"{file.name}{line}", reason) from None
    if isinstance(found, dict):
        lists = (found[name] for name in _LISTS if isinstance(found.get(name), list))
        found = next(lists, [found])
    if not isinstance(found, list):
        raise ReferenceSetError(f"{file.name!r} must hold a list, not {type(found).__name__}.")
    for number, value in enumerate(found, start=1):
        yield Item(f"{file.name}, item {number}", value)


def _read_table(file: DataFile) -> Iterator[Item]:
    """Yield the rows of a .csv or .tsv file by the names in its first row."""
    csv.field_size_limit((1 << 31) - 1)  # a text may be longer than the module's 128 KiB
    with _open_text(file, newline="") as text:
        first = text.readline()
        rows = csv.reader(chain([first], text), delimiter=_separator(file, first), strict=True)
        header: list[str] = []
        before = 0  # lines that earlier rows took
        try:
            for cells in rows:
                place = f"{file.name}, line {before + 1}"
                before = rows.line_num
                if not header:
                    header = _check_header(place, cells)
                elif len(cells) == len(header):
                    yield Item(place, dict(zip(header, cells, strict=True)))
                elif cells:  # not a blank line
                    raise ReferenceSetError(
                        f"{place}: has {len(cells)} cells, and the first row has {len(header)}. "
                        f"Quote a cell that holds the separator or a new line."
                    )
        except csv.Error as error:
            raise ReferenceSetError(f"{file.name}, line {before + 1}: {error}.") from None


def _separator(file: DataFile, header: str) -> str:
    """Return what stands between cells; in some countries .csv files have semicolons."""
    if file.format == "tsv":
        return "\t"
    return ";" if ";" in header and "," not in header else ","


def _check_header(place: str, cells: list[str]) -> list[str]:
    if len(set(cells)) < len(cells):
        raise ReferenceSetError(
            f"{place}: the first row must name the columns, each differently; got {cells!r}."
        )
    return cells


def _read_parquet(file: DataFile) -> Iterator[Item]:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise MissingDependencyError(
            ".parquet files need the package pyarrow: pip install 'knn-moe[eval]'."
        ) from None
    number = 0
    try:
        with file.open() as data:
            for batch in ParquetFile(data).iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield Item(f"{file.name}, row {number}", row)
    except (OSError, ValueError, pyarrow.ArrowException) as error:  # ValueError: not UTF-8
        raise _cannot_read(file, error) from None


_READERS: Final[dict[str, Callable[[DataFile], Iterator[Item]]]] = {
    "jsonl": _read_json_lines,
    "json": _read_json,
    "csv": _read_table,
    "tsv": _read_table,
    "parquet": _read_parquet,
}
