"""Write files atomically; read lines; keep temporary folders for as long as they are used."""

from __future__ import annotations

import gzip
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path

from knn_moe.errors import KnnMoeError


def write_whole(path: Path, text: str) -> None:
    """Write `text` to a file beside `path` and rename it: `path` never holds a part of it."""
    scratch = path.with_name(f"{path.name}.new")
    try:
        scratch.write_text(text, encoding="utf8")
        scratch.replace(path)
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


class TemporaryFolder:
    """A folder that is removed together with the last reference to this object."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="knn-moe-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
