"""`knn-moe`: the group of commands, and how errors are told.

Commands are imported when they are asked for, so that `--help` answers at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

import click

from knn_moe.errors import KnnMoeError

# command, a module of this package → its line in the list
COMMANDS: Final[Mapping[str, str]] = {
    "routers": "Show which routers of a model a memory would touch.",
    "label": "Make a reference set of prompts that have no answers.",
    "build": "Build a memory from a reference set.",
    "calibrate": "Find out how a memory is best used.",
    "inspect": "Show what a memory holds and whose it is.",
    "generate": "Generate text with and without a memory.",
    "explain": "Show what a memory recalled for each token of a text, and what it did.",
    "compress": "Make a memory small, and quick to search.",
    "prune": "Keep the cases of a memory that are worth most.",
    "merge": "Make one memory of several.",
    "drop": "Take examples out of a memory.",
    "eval": "Put benchmarks to a model, with a memory and without.",
    "compare": "Compare evaluated methods, with intervals and paired tests.",
    "report": "Make one page of evaluated runs.",
    "reproduce": "Make the tables of the paper again.",
    "demo": "See the method work on a small model that comes with the package.",
    "bench": "Measure speed against a named baseline.",
}


class Commands(click.Group):
    """Lists commands without importing them; turns this library's errors into exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"knn_moe.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KnnMoeError as error:
            raise click.UsageError(str(error)) from None
        except OSError as error:
            raise click.UsageError(f"The system refused: {error}.") from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="knn-moe")
def main() -> None:
    """Adapt a frozen Mixture-of-Experts model to new text, without touching a weight.

    \b
    knn-moe build allenai/OLMoE-1B-7B-0125-Instruct ref.jsonl -o memory
    knn-moe generate allenai/OLMoE-1B-7B-0125-Instruct "A fever is" --memory memory
    """


if __name__ == "__main__":
    main()
