"""`knn-moe reproduce`: reproduce the tables of the paper, and the study of pretrained models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from knn_moe.cli.common import (
    PATH,
    POSITIVE,
    batch_size_option,
    complete_tasks,
    data_option,
    evaluation_dtype,
    json_option,
    model_options,
    pick_given,
    print_json,
    print_note,
    print_paragraph,
    print_table,
    program_options,
    seed_option,
    show_progress,
)
from knn_moe.cli.pretrained import Loader, pretrained
from knn_moe.routers.load import load_structure, pick_device

if TYPE_CHECKING:
    from knn_moe.reproduce.plan import Plan
    from knn_moe.reproduce.table import Table


class TablesByDefault(click.Group):
    """A group whose command is `tables` if none is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else ["tables", *args])


@click.group(name="reproduce", cls=TablesByDefault)
def command() -> None:
    """Reproduce tables of the paper, or the study of pretrained models.

    \b
    knn-moe reproduce --list
    knn-moe reproduce main -o results --limit 20
    knn-moe reproduce all -o results --jobs 2
    knn-moe reproduce pretrained --model smol-moe -o study --part accuracy -t sciq

    Without a command, the arguments are those of `knn-moe reproduce tables`.
    """


command.add_command(pretrained)


def _complete_tables(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    from knn_moe.reproduce.catalogue import ALL, TABLES

    return [name for name in (ALL, *TABLES) if name.startswith(begun)]


@command.command(name="tables")
@click.argument("tables", nargs=-1, shell_complete=_complete_tables)
@click.option("--list", "list_tables", is_flag=True, help="List the tables.")
@click.option("-o", "--output", type=PATH, help="Write tables and runs to this folder.")
@click.option(
    "--model",
    "models",
    multiple=True,
    help="Use this model. Can be repeated. Default: the embedded models.",
)
@click.option(
    "-t",
    "--task",
    "tasks",
    multiple=True,
    shell_complete=complete_tasks,
    help="Use this task. Can be repeated. Default: mmlu, medmcqa and text_medical.",
)
@data_option
@click.option(
    "--limit", type=POSITIVE, help="Ask at most this many questions of each task. Default: 64."
)
@click.option(
    "--reference",
    type=POSITIVE,
    help="Use at most this many rows of each reference set. Default: 40.",
)
@seed_option("every random choice")
@batch_size_option
@click.option(
    "--jobs",
    type=POSITIVE,
    default=1,
    show_default=True,
    help="Run this many processes. Only on a CPU.",
)
@click.option(
    "--as-printed",
    is_flag=True,
    help="Use the paper's six tasks in full, generated answers and the paper's own configuration.",
)
@program_options
@model_options
@json_option
def tables_command(
    tables: tuple[str, ...], list_tables: bool, output: Path | None, as_json: bool, **options: Any
) -> None:
    """Reproduce TABLES of the paper, or all of them.

    \b
    knn-moe reproduce --list
    knn-moe reproduce main -o results --limit 20
    knn-moe reproduce all -o results --jobs 2
    knn-moe reproduce main --as-printed --model allenai/OLMoE-1B-7B-0125-Instruct -o olmoe

    Each table is written as TABLE.json, .md, .tex and .svg. Results that are already in the folder
    are used again, so an interrupted command continues where it stopped.
    """
    if list_tables:
        _show_list(as_json)
        return
    if not tables or output is None:
        raise click.UsageError("Give a TABLE (or all) and -o FOLDER, or use --list.")
    made = _reproduce(tables, output, options)
    if as_json:
        print_json([table.to_dict() for table in made])
        return
    for table in made:
        rows = [[cell.text for cell in row] for row in table.rows]
        print_table(table.title, table.columns, rows)
        for note in table.notes:
            print_paragraph(note)


def _reproduce(tables: tuple[str, ...], output: Path, options: dict[str, Any]) -> list[Table]:
    from knn_moe.reproduce.catalogue import choose_tables
    from knn_moe.reproduce.reproduce import reproduce
    from knn_moe.reproduce.study import Study
    from knn_moe.routers.find import find_routers

    choose_tables(tables)  # refuses one that is not known
    plan = _make_plan(options)
    device = pick_device(options["device"])
    if device.type != "cpu" and options["jobs"] > 1:
        raise click.UsageError(f"--jobs works only on a CPU, and this command runs on {device}.")
    for name in plan.models:
        find_routers(load_structure(name))  # refuses a bad model before anything runs
    load = Loader(options["device"], evaluation_dtype(options["device"], options["dtype"]))
    made = []
    with show_progress("Reproducing") as report:
        study = Study(plan, output, load, report, device, load.dtype, options["jobs"])
        for table in reproduce(study, tables):
            made.append(table)
            print_note(f"{table.title}: {output / table.name}.md")
    return made


def _make_plan(options: Any) -> Plan:
    from knn_moe.reproduce.plan import Plan

    chosen = ("models", "tasks", "limit", "reference", "data", "seed", "batch_size")
    given = pick_given(options, *chosen)
    if not options["as_printed"]:
        return Plan(**given)
    if not options["models"]:
        raise click.UsageError(
            "--as-printed needs a model that follows instructions. Name one with --model."
        )
    return Plan.of_the_paper(given.pop("models"), given.pop("data", None), **given)


def _show_list(as_json: bool) -> None:
    from knn_moe.reproduce.catalogue import TABLES

    rows = [(name, spec.title, spec.number) for name, spec in TABLES.items()]
    if as_json:
        print_json([{"name": name, "title": title, "paper": where} for name, title, where in rows])
        return
    print_table(None, ("table", "title", "in the paper"), rows)
