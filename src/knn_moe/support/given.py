"""Say what was given where something else was wanted. Knows Python's values, nothing of ours."""

from __future__ import annotations

from pathlib import Path


def describe(given: object) -> str:
    """Return a few words that say what was given."""
    if given is None:
        return "None"
    kind = type(given).__name__
    if isinstance(given, list | tuple):
        return f"a {kind} of {len(given)}"
    shown = repr(given)
    return f"a {kind}" if len(shown) > 60 or "\n" in shown else f"{shown} (of type {kind})"


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
