"""Files and folders: written whole or not at all, and gone when nobody needs them."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Written beside and renamed: what is there is whole, or what was there before."""
    scratch = path.with_name(f"{path.name}.new")
    try:
        scratch.write_text(text, encoding="utf8")
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


class TemporaryFolder:
    """A folder that goes when the last reference to it does."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="knn-moe-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
