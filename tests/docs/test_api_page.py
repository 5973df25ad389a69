"""docs/api.md lists every public name; each has a docstring, and lies where the page says."""

from __future__ import annotations

import inspect
import pkgutil
import re
from importlib import import_module
from pathlib import Path

import knn_moe
import knn_moe.tasks

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf8")
LISTED = dict(re.findall(r"^::: (\S+)(?:\n    options: (.*))?", PAGE, flags=re.MULTILINE))


def test_every_public_name_is_listed() -> None:
    public = [f"knn_moe.{name}" for name in knn_moe.__all__]
    public += [f"knn_moe.tasks.{name}" for name in knn_moe.tasks.__all__]
    assert set(public) <= set(LISTED)


def test_every_listed_name_is_imported_from_where_the_page_says() -> None:
    for path in LISTED:
        if path != "knn_moe.errors":
            module, _, name = path.rpartition(".")
            assert module in ("knn_moe", "knn_moe.tasks", "knn_moe.methods"), path
            assert name in import_module(module).__all__, path


def test_every_listed_name_and_its_methods_have_docstrings() -> None:
    for path, options in LISTED.items():
        module, _, name = path.rpartition(".")
        parent = pkgutil.resolve_name(module)
        listed = getattr(parent, name)
        assert inspect.getdoc(listed), path
        if inspect.isclass(listed) and "members: false" not in options:
            for member, value in vars(listed).items():
                public = inspect.isfunction(value) or isinstance(value, property | classmethod)
                if public and not member.startswith("_"):
                    assert inspect.getdoc(getattr(listed, member)), f"{path}.{member}"
