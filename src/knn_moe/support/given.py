"""Say what was given where something else was wanted: a value of Python, or what is at a place."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from knn_moe.support.embedded_models import EMBEDDED_MODELS
from knn_moe.support.folders import expand_home

MEMORY_CONFIG: Final = "memory_config.json"  # which every memory has


def describe(given: object) -> str:
    """Return a few words that say what was given."""
    if given is None:
        return "None"
    kind = type(given).__name__
    if isinstance(given, list | tuple):
        return f"a {kind} of {len(given)}"
    shown = repr(given)
    return f"a {kind}" if len(shown) > 60 or "\n" in shown else f"{shown} (of type {kind})"


def kind_of_place(place: str | Path) -> str | None:
    """Return what is at `place`: "a file", "a memory" or "a model", or None if none of these."""
    path = expand_home(place)
    if path.is_file():
        return "a file"
    if (path / MEMORY_CONFIG).is_file():
        return "a memory"
    if str(place) in EMBEDDED_MODELS and not path.is_dir():
        return "a model"
    config = path / "config.json"
    return "a model" if config.is_file() and b'"model_type"' in config.read_bytes() else None


def say_no_model(given: object) -> str:
    """Return a sentence about something that was given as a model and is none."""
    if isinstance(given, str | Path):
        name = str(given)
        return (
            f"A loaded model is needed, and {name!r} is a name. Load it first: "
            f"model, tokenizer = load_model({name!r})."
        )
    hint = " load_model returns two things: the model and its tokenizer."
    return f"A loaded model is needed, and {describe(given)} is none." + hint * isinstance(
        given, tuple
    )
