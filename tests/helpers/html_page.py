"""Parse a page as a browser would, and fail on tags that do not match."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """The tags of a page, its scripts, and its text as a reader sees it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.text += data

    def with_class(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.tags if name in (attrs.get("class") or "").split()]


def assert_self_contained(html: str) -> None:
    """Check that all tags match and that the page loads nothing from elsewhere."""
    page = Page(html)
    assert page.open == []
    # Libraries and licences name pages that nobody loads.
    own = re.sub(r'<script[^>]* class="(?:library|licences)">.*?</script>', "", html, flags=re.S)
    assert not re.search(r"https?://|url\(|@import|<link|<iframe|<img", own)
    assert not any({"src", "srcset"} & attrs.keys() for _, attrs in page.tags)
    links = [attrs["href"] or "" for _, attrs in page.tags if "href" in attrs]
    assert all(link.startswith(("data:text/csv", "#")) for link in links)
