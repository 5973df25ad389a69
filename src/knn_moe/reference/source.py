"""Where a reference set comes from: a file, a folder of files, standard input, a data set of the
hub, a table in memory, or anything that can be iterated.

Yields items with their places; what an item means is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from knn_moe.errors import ReferenceSetError
from knn_moe.reference import files
from knn_moe.reference.files import DataFile, Item, find_format, open_file, open_stdin, read_file
from knn_moe.reference.hub import open_hub, parse_hub_name, read_hub
from knn_moe.support.folders import expand_home
from knn_moe.support.given import kind_of_place

_NAMED: Final = 3  # skipped files that are named
_LONGEST: Final = 1000  # characters of a name: more are a text
_LONGEST_PART: Final = 255  # bytes of a name in a folder


@dataclass
class Source:
    """Items that can be read as often as `given` can.

    Args:
        given: A path or a name, or an object that holds rows.
        noun: What errors call an item of an object.
        split: How plain text is split: "paragraphs", "none", or at each place with this text.
            None: as `default_split` says.
        format: The format of a file or of standard input. None: as the ending says.
    """

    given: object
    noun: str = "Example"
    split: str | None = None
    format: str | None = None
    default_split: str = files.PARAGRAPHS
    skipped: list[Path] = field(default_factory=list, init=False)
    count: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.split == "":
            raise ReferenceSetError(
                'split is empty. Give "paragraphs", "none", or the text between two examples.'
            )
        if self.format is not None and self.format not in files.FORMATS:
            raise ReferenceSetError(
                f"Unknown format {self.format!r}. Known: {', '.join(files.FORMATS)}."
            )
        if not self.is_named and (self.split or self.format):
            raise ReferenceSetError("split and format are for named files only. Leave them out.")

    @property
    def is_named(self) -> bool:
        """Whether `given` is a path or a name."""
        return isinstance(self.given, str | Path)

    def items(self) -> Iterator[Item]:
        """Yield all items.

        Raises:
            ReferenceSetError: They cannot be read.
            MissingDependencyError: They need a package that is not installed.
        """
        self.count = 0
        for item in self._items():
            self.count += 1
            yield item

    def _items(self) -> Iterator[Item]:
        if not self.is_named:
            for number, value in enumerate(iter_rows(self.given)):
                yield Item(f"{self.noun} {number}", value)
        elif isinstance(self._opened, list):
            for file in self._opened:
                yield from read_file(file, self.split or self.default_split)
        else:
            yield from read_hub(str(self.given), self._opened)

    @cached_property
    def _opened(self) -> Any:
        """The files, or a data set of the hub."""
        name = str(self.given)
        if name == files.STDIN:
            return self._check_split([open_stdin(self.format)])
        if "\n" in name or _is_too_long(name):
            raise ReferenceSetError(
                f"{name[:40]!r}… is a text, not the name of a file. Give a list of texts."
            )
        path, kind = expand_home(name), kind_of_place(name)
        if kind in ("a memory", "a model"):
            raise ReferenceSetError(
                f"{name!r} is {kind}, not a reference set. Name a file or folder of examples."
            )
        if path.is_dir():
            if self.format is not None:
                raise ReferenceSetError(
                    f"A format is of one file, and {name!r} is a folder. Leave {self.format!r} out."
                )
            return self._check_split(self._open_folder(path))
        if path.exists():
            return self._check_split([open_file(path, self.format)])
        hub = None if find_format(path) else parse_hub_name(name)
        if hub is None:
            raise ReferenceSetError(
                f"There is no file or folder {name!r}. A data set of the hub is named as ORG/NAME "
                f"or ORG/NAME:SPLIT."
            )
        if self.split is not None or self.format is not None:
            raise ReferenceSetError(
                f"{name!r} is a data set, which has rows: leave split (--split) and format "
                f"(--format) out. A part of it is named as ORG/NAME:SPLIT."
            )
        return open_hub(hub)

    def _open_folder(self, folder: Path) -> list[DataFile]:
        """Return all files of known formats, in the order of their names; hidden ones are left."""
        found = []
        for path in sorted(folder.rglob("*")):
            hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
            if hidden or not path.is_file():
                continue
            if find_format(path) is None or not path.stat().st_size:
                self.skipped.append(path)
            else:
                found.append(open_file(path))
        if not found:
            raise ReferenceSetError(
                f"The folder {str(folder)!r} holds no examples. Known endings: {files.ENDINGS}; "
                f"all but .parquet may be followed by .gz."
            )
        return found

    def _check_split(self, found: list[DataFile]) -> list[DataFile]:
        if self.split is not None and not any(file.format in files.TEXT for file in found):
            raise ReferenceSetError(
                f"Only plain text is split, and {str(self.given)!r} is {found[0].format}. Leave "
                f"split={self.split!r} (--split) out."
            )
        return found

    def describe(self, noun: str = "example") -> str:
        """Return a sentence that says what was read, and one that says what was skipped."""
        many = f"{self.count:,} {noun}{'' if self.count == 1 else 's'}"
        opened = self._opened if self.is_named else []
        texts = isinstance(opened, list) and any(file.format in files.TEXT for file in opened)
        folder = f"{len(opened)} files of " if expand_home(str(self.given)).is_dir() else ""
        name = "standard input" if str(self.given) == files.STDIN else self.given
        said = f"Read {many} from {folder}{name}{self._describe_split() if texts else ''}."
        if not self.skipped:
            return said
        named = ", ".join(path.name for path in self.skipped[:_NAMED])
        more = f" and {len(self.skipped) - _NAMED} more" if self.skipped[_NAMED:] else ""
        return f"{said} Skipped, as empty or of another ending: {named}{more}."

    def _describe_split(self) -> str:
        split = self.split or self.default_split
        if split == files.PARAGRAPHS:
            return ", text split at blank lines (--split)"
        return ", each text whole" if split == files.WHOLE else f", text split at {split!r}"


def iter_rows(given: object) -> Iterator[Any]:
    """Yield the rows of a DataFrame, a table or a data set, or the items of an iterable.

    Raises:
        ReferenceSetError: It is something else.
    """
    library = type(given).__module__.partition(".")[0]
    table: Any = given
    if library == "pandas" and hasattr(given, "itertuples"):
        names = list(table.columns)
        for values in table.itertuples(index=False, name=None):
            yield {name: _plain(value) for name, value in zip(names, values, strict=True)}
    elif library == "polars" and hasattr(given, "collect"):
        yield from iter_rows(table.collect())
    elif library == "polars" and hasattr(given, "iter_rows"):
        yield from table.iter_rows(named=True)
    elif library == "pyarrow" and hasattr(given, "to_batches"):
        for batch in table.to_batches():
            yield from batch.to_pylist()
    elif isinstance(given, Mapping):
        raise ReferenceSetError(
            f"The reference set is a mapping of {', '.join(map(repr, given))}: choose one of them, "
            f"or give a list of rows."
        )
    elif isinstance(given, bytes | bytearray | memoryview) or not _can_iterate(given):
        raise ReferenceSetError(
            f"Examples are given as the name of a file, a folder or a data set, as a list, a "
            f"DataFrame or a Dataset; got {type(given).__name__}."
        )
    else:
        yield from table


def _is_too_long(name: str) -> bool:
    parts = name.encode(errors="replace").split(b"/")
    return len(name) > _LONGEST or any(len(part) > _LONGEST_PART for part in parts)


def _can_iterate(given: object) -> bool:
    # A map-style data set of torch has no __iter__.
    return isinstance(given, Iterable) or (
        hasattr(given, "__getitem__") and hasattr(given, "__len__")
    )


def _plain(value: Any) -> Any:
    """Return a cell of a pandas DataFrame as Python has it: None where it is missing."""
    if type(value).__module__.partition(".")[0] == "numpy":
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    missing = type(value).__name__ in ("NAType", "NaTType")
    return None if missing or (isinstance(value, float) and value != value) else value
