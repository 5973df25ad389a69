"""`--config FILE`: options of a long command from a TOML file. The command line wins."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

import click

from knn_moe.support.registry import unknown_name

# Commands that are given many options, and those that are often given the same ones.
COMMANDS: Final = (
    "label", "build", "calibrate", "distil", "compress", "prune", "eval", "reproduce", "demo",
    "bench", "serve",
)  # fmt: skip
_NOT_IN_FILES: Final = ("config", "resume", "overwrite")  # for a moment, not for a setting


def accept_config(command: click.Command) -> None:
    """Add --config to a command, or to the commands of a group, unless they have it."""
    if isinstance(command, click.Group):
        for part in command.commands.values():
            accept_config(part)
    elif "config" not in {parameter.name for parameter in command.params}:
        option = click.Option(
            ["--config"],
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            is_eager=True,  # before the options whose values it holds
            expose_value=False,
            callback=_use_config,
            help="Read options from this TOML file, by their long names. The command line wins.",
        )
        command.params.append(option)


def _use_config(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"{str(path)!r} is not a TOML file: {error}.") from None
    options = {
        _key(each): each
        for each in context.command.params
        if isinstance(each, click.Option) and each.name not in _NOT_IN_FILES
    }
    values = {}
    for key, value in given.items():
        option = options.get(key)
        if option is None:
            raise click.UsageError(f"{str(path)!r}: {unknown_name('option', key, options)}")
        values[option.name] = _read(option, value, f"{str(path)!r}: {key}")
    context.default_map = {**(context.default_map or {}), **values}


def _key(option: click.Option) -> str:
    """Return an option's long name, without its dashes."""
    return max(option.opts, key=len).lstrip("-")


def _read(option: click.Option, value: Any, place: str) -> Any:
    """Return a value as the command line has it, so that it is checked in the same way.

    Raises:
        UsageError: It is not of the kind that the option takes.
    """
    if option.is_flag:
        if not isinstance(value, bool):
            raise click.UsageError(f"{place} must be true or false, got {value!r}.")
        return value
    if option.multiple:
        values = value if isinstance(value, list) else [value]
        return [_read_one(each, place, "a text, a number, or a list of them") for each in values]
    return _read_one(value, place, "a text or a number")


def _read_one(value: object, place: str, expected: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise click.UsageError(f"{place} must be {expected}, got {value!r}.")
    return str(value)
