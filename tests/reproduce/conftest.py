"""Tasks of a few questions and of a little text."""

from __future__ import annotations

import json

import pytest

from helpers.quiz import make_questions


@pytest.fixture(scope="module")
def quiz(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of multiple-choice questions, with its reference set beside it."""
    folder = tmp_path_factory.mktemp("quiz")
    for name, rows in (("quiz", make_questions(9)), ("quiz_ref", make_questions(7, seed=1))):
        text = "".join(json.dumps(each) + "\n" for each in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf8")
    return str(folder / "quiz.jsonl")


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of plain texts, with its reference set beside it."""
    folder = tmp_path_factory.mktemp("prose")
    line = "The {} river rose in the night and by morning the {} fields were under water. "
    words = ("old", "broad", "lower", "upper", "far", "green", "grey", "near")
    for name, shift in (("prose", 0), ("prose_ref", 3)):
        rows = [
            {"text": "".join(line.format(words[(n + m) % 8], m + shift) for m in range(20))}
            for n in range(3 + shift)
        ]
        text = "".join(json.dumps(each) + "\n" for each in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf8")
    return str(folder / "prose.jsonl")
