"""Write files atomically and durably; read lines."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from knn_moe.errors import ConfigError, KnnMoeError
from knn_moe.support.folders import sync


def check_place(path: Path) -> None:
    """Refuse a place where no file can be, before the work that is written there.

    Raises:
        ConfigError: `path` is a folder, or in a folder that is not there.
    """
    if path.is_dir():
        raise ConfigError(f"{str(path)!r} is a folder. Name a file in it.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"There is no folder {str(path.parent)!r} to write {path.name!r} to.")


def write_whole(path: Path, text: str) -> None:
    """Write `text` to a file beside `path`, wait for the disk, and rename it; .gz files are packed.

    `path` never holds a part of the text, also after a power cut.
    """
    scratch = path.with_name(f"{path.name}.new")
    content = text.encode("utf8")
    try:
        with scratch.open("wb") as file:
            file.write(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
        sync(path.parent)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def read_lines(path: Path, error: type[KnnMoeError]) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of every line that is not blank; .gz files are unpacked.

    Raises:
        KnnMoeError: The file cannot be read; of the class `error`.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf8") as lines:
            yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as reason:
        raise error(f"Cannot read {str(path)!r}: {reason}.") from None
