"""docs/api.md lists every public name, and each has a docstring."""

from __future__ import annotations

import inspect
import pkgutil
import re
from pathlib import Path

import knn_moe
import knn_moe.tasks

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf8")
LISTED = dict(re.findall(r"^::: (\S+)(?:\n    options: (.*))?", PAGE, flags=re.MULTILINE))


def test_every_public_name_is_listed() -> None:
    public = [f"knn_moe.{name}" for name in knn_moe.__all__]
    public += [f"knn_moe.tasks.{name}" for name in knn_moe.tasks.__all__]
    assert set(public) <= set(LISTED)


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
