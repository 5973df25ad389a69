"""Data sets on the hub, or in a folder of the same form, through the package datasets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple

from knn_moe.errors import MissingDependencyError, ReferenceSetError
from knn_moe.reference.files import Item
from knn_moe.support.folders import expand_home
from knn_moe.support.hub import hub_or_cache

_NAME: Final = re.compile(
    r"(?P<path>[^:]+?)(?::(?P<config>[^:\[\]]+)(?=:))?(?::(?P<split>\w[\w.+-]*(?:\[[^\]]*\])?))?"
)
_HUB_ID: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*")


class HubName(NamedTuple):
    """A data set: its hub id or folder, its configuration and its split, each if it was named."""

    path: str
    config: str | None
    split: str | None


def parse_hub_name(name: str) -> HubName | None:
    """Return what ORG/NAME, ORG/NAME:SPLIT or ORG/NAME:CONFIG:SPLIT says, or None.

    A folder takes the place of ORG/NAME only where a split is named.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    parsed = HubName(**found.groupdict())
    folder = expand_home(parsed.path)
    if parsed.split is not None and folder.is_dir():
        return parsed._replace(path=str(folder))
    return parsed if _HUB_ID.fullmatch(parsed.path) else None


def open_hub(name: HubName) -> Any:
    """Return a split of the data set: the one that is named, its only one, or train.

    Raises:
        ReferenceSetError: It cannot be loaded, or has several splits and none is called train.
        MissingDependencyError: The package datasets is not installed.
    """
    try:
        from datasets import get_dataset_split_names, load_dataset
    except ImportError:
        raise MissingDependencyError(
            f"There is no file {name.path!r}, and data sets of the hub need the package datasets: "
            f"pip install 'knn-moe[eval]'."
        ) from None
    split = name.split
    try:
        with nullcontext() if Path(name.path).is_dir() else hub_or_cache():
            if split is None:
                splits = get_dataset_split_names(name.path, name.config)
                split = splits[0] if len(splits) == 1 else "train" if "train" in splits else ""
            if split:
                return load_dataset(name.path, name.config, split=split)
    except Exception as error:  # the hub, its gates and the network each have their own
        reason = (str(error).strip() or repr(error)).splitlines()[0].rstrip(".")
        raise ReferenceSetError(
            f"There is no file {name.path!r}, and it cannot be loaded as a data set of the hub: "
            f"{reason}."
        ) from None
    raise ReferenceSetError(
        f"The data set {name.path!r} has the splits {', '.join(splits)}. Name one of them: "
        f"{name.path}:{splits[0]}."
    )


def read_hub(name: str, dataset: Any) -> Iterator[Item]:
    """Yield the rows of an open data set."""
    for number, row in enumerate(dataset):
        yield Item(f"{name}, row {number}", row)
