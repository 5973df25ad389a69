"""The small trained models that come with the package, by name.

Knows where they are. They load like any folder, with `from_pretrained`, and need no network.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_ASSETS: Final = Path(__file__).parents[1] / "assets"

EMBEDDED_MODELS: Final = ("tiny-olmoe", "tiny-qwen3", "tiny-gpt-oss")


def embedded_model(name: str) -> str:
    """Return the folder of an embedded model, or any other name unchanged."""
    return str(_ASSETS / name) if name in EMBEDDED_MODELS else name


def public_name(path: str) -> str:
    """Return the name of the embedded model at `path`, or any other path unchanged."""
    folder = Path(path)
    return folder.name if folder.parent == _ASSETS else path
