"""Write files atomically; keep temporary folders for as long as they are used."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text` to a file beside `path` and rename it: `path` never holds a part of it."""
    scratch = path.with_name(f"{path.name}.new")
    try:
        scratch.write_text(text, encoding="utf8")
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


class TemporaryFolder:
    """A folder that is removed together with the last reference to this object."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="knn-moe-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
