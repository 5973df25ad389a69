"""The playground: one page without data, whose scripts ask the endpoints.

Knows the page and what a browser may do with it; nothing of models.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from knn_moe.explain.reader import FACTORS
from knn_moe.pages.page import render

_PARTS: Final = {
    "style-src": re.compile("<style>(.*?)</style>", re.DOTALL),
    "script-src": re.compile("<script>(.*?)</script>", re.DOTALL),
}


class Playground(NamedTuple):
    """The page, and the headers it is sent with."""

    html: str
    headers: Mapping[str, str]


def playground() -> Playground:
    """Return the page.

    A browser runs its own styles and scripts, by their digests, and no others; and it asks nobody
    but this server. So a text that was taken for markup could do nothing.
    """
    html = render("playground.html.j2", {"factors": FACTORS})
    own = [f"{name} {' '.join(map(_digest, part.findall(html)))}" for name, part in _PARTS.items()]
    others = "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return Playground(
        html,
        {
            "Content-Security-Policy": f"default-src 'none'; {'; '.join(own)}; {others}",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        },
    )


def _digest(part: str) -> str:
    digest = hashlib.sha256(part.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
