"""Fill a template and write the page. Knows templates and files; nothing of what a page shows."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from knn_moe.pages import words
from knn_moe.support.files import write_whole


def render(template: str, context: dict[str, Any]) -> str:
    """Return the page that `template` makes of `context`; texts are escaped."""
    environment = Environment(
        loader=FunctionLoader(_read_template),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["words"] = words
    # A library's braces are no template's.
    environment.globals["read"] = lambda name: Markup(_read_template(name))
    return environment.get_template(template).render(context)


def _read_template(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf8")


def write_page(page: str, path: Path) -> None:
    """Write the whole page to `path`, or leave what is there."""
    # A token may hold half of a character, which a browser shows as an unknown character.
    write_whole(path, page.encode("utf8", "xmlcharrefreplace").decode("utf8"))
