"""Run the command line as a user does, and check how it refuses bad input."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from helpers.families import FAMILIES
from knn_moe.bench.models import number_tokenizer
from knn_moe.cli.main import main


def run_cli(*arguments: object) -> Result:
    """Run `knn-moe` with these arguments in this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def save_model(name: str, folder: Path) -> Path:
    """Save the family `name` with the number tokenizer and return its folder."""
    family = next(family for family in FAMILIES if family.name == name)
    family.build().save_pretrained(folder)
    number_tokenizer(128).save_pretrained(folder)
    return folder


def assert_refused(result: Result, *words: str) -> None:
    """Check that a command ended with exit code 2 and a message that contains `words`."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    message = " ".join(result.stderr.split())
    for part in words:
        assert part in message, result.stderr
    assert "Traceback" not in result.stderr
