"""`knn-moe`: the group of commands, and how an error reaches the user.

A command is imported when it is called, so that `--help` answers at once.
"""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from knn_moe.cli import config_file
from knn_moe.cli.program import EXIT_CODE, Program
from knn_moe.errors import KnnMoeError
from knn_moe.support.registry import unknown_name
from knn_moe.support.terminal import printable

# A command, which is a module of this package, and its line in the list.
COMMANDS: Final[Mapping[str, str]] = {
    "routers": "List the routers of a model that a memory would change.",
    "label": "Make a reference set from prompts that have no answers.",
    "build": "Build a memory from a reference set.",
    "calibrate": "Choose how a memory is used.",
    "distil": "Learn a few prototypes that stand for all cases of a memory.",
    "inspect": "Show what a memory contains.",
    "generate": "Generate text with and without a memory.",
    "chat": "Talk to a model with its memories.",
    "serve": "Serve a model and its memories to OpenAI's clients.",
    "explain": "Show what a memory recalled for each token, and what changed.",
    "compress": "Make a memory small and fast to search.",
    "prune": "Keep the most useful cases of a memory.",
    "merge": "Join several memories into one.",
    "drop": "Remove examples from a memory.",
    "eval": "Evaluate a model on benchmarks, with and without a memory.",
    "compare": "Compare evaluated methods, with intervals and paired tests.",
    "report": "Write an HTML page about evaluated runs.",
    "reproduce": "Reproduce the tables of the paper.",
    "demo": "See the method work on a small model that comes with the package.",
    "bench": "Measure speed against a baseline.",
}


class Commands(click.Group):
    """List commands without importing them, and end with exit code 2 on this library's errors."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in COMMANDS:
            ctx.fail(unknown_name("command", cmd_name, COMMANDS))
        module = importlib.import_module(f"knn_moe.cli.{cmd_name}")
        command: click.Command = module.command
        if cmd_name in config_file.COMMANDS:
            config_file.accept_config(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> Any:
        """Run a command; without `args`, the one of this process's command line."""
        self.program = Program(sys.argv[1:] if args is None else args)
        if args is None:
            self.program.start()
        try:
            return super().main(args, *others, **options)
        except SystemExit as end:
            self.program.exit_code = end.code if isinstance(end.code, int) else bool(end.code)
            raise

    def invoke(self, ctx: click.Context) -> Any:
        warnings.showwarning = _print_warning
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            self.program.say()
            ctx.exit(EXIT_CODE)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            raise click.UsageError(printable(error.format_message()), error.ctx) from None
        except KnnMoeError as error:
            raise click.UsageError(printable(str(error))) from None
        except BrokenPipeError:  # `| head` has what it wanted: click ends quietly
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise click.UsageError(printable(_explain_full_disk(error))) from None
            where = "" if error.filename is None else f" {str(error.filename)!r}"
            reason = error.strerror or str(error)
            raise click.UsageError(printable(f"Cannot read or write{where}: {reason}.")) from None


def _explain_full_disk(error: OSError) -> str:
    place = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
    folder = next((path for path in place.parents if path.is_dir()), None) if place else None
    free = f" {shutil.disk_usage(folder).free / 1e6:,.3f} MB are free." if folder else ""
    what = f" while {str(place)!r} was written" if place else ""
    return f"The disk is full{what}.{free} Make room, or write to another disk."


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    click.echo(f"Warning: {message}", err=True)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="knn-moe")
def main() -> None:
    """Adapt a frozen Mixture-of-Experts model to new text without changing a weight.

    \b
    knn-moe build tiny-olmoe reference.jsonl -o memory
    knn-moe calibrate tiny-olmoe memory -o calibrated
    knn-moe generate tiny-olmoe "A fever is" --memory calibrated --compare

    A memory stores, for every token of a reference set, the router input and better routing logits.
    While the model runs, each router recalls the cases nearest to its input and mixes their logits
    with its own.
    """


if __name__ == "__main__":
    main()
