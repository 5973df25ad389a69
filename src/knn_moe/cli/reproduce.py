"""`knn-moe reproduce`: the paper's tables, on models and data that are at hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from knn_moe.cli.common import (
    device_option,
    dtype_option,
    json_option,
    load_model,
    load_structure,
    log,
    pick_device,
    print_json,
    print_table,
    progress_bar,
    usual_dtype,
)

if TYPE_CHECKING:
    from knn_moe.reproduce.plan import Plan


@click.command(name="reproduce")
@click.argument("tables", nargs=-1)
@click.option("--list", "list_tables", is_flag=True, help="Show the tables there are.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder of tables and runs.")
@click.option("--model", "models", multiple=True, help="May be repeated. Default: the embedded.")
@click.option("-t", "--task", "tasks", multiple=True, help="May be repeated.")
@click.option("--data", help="As for eval: a folder, hub or package. Default: KNN_MOE_DATA.")
@click.option("--limit", type=click.IntRange(min=1), help="Questions of a task. Default: 64.")
@click.option("--reference", type=click.IntRange(min=1), help="Reference rows. Default: 40.")
@click.option("--seed", default=0, show_default=True, help="Of what is drawn.")
@click.option("--batch-size", default=16, show_default=True)
@click.option(
    "--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes, on a CPU."
)
@click.option(
    "--as-printed",
    is_flag=True,
    help="The paper's six tasks, whole unless limited, in words, by its own setting.",
)
@device_option
@dtype_option
@json_option
def command(
    tables: tuple[str, ...],
    list_tables: bool,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Make TABLES of the paper again, or all of them.

    \b
    knn-moe reproduce --list
    knn-moe reproduce main -o results --limit 20
    knn-moe reproduce all -o results --jobs 2
    knn-moe reproduce main --as-printed --model allenai/OLMoE-1B-7B-0125-Instruct -o olmoe

    Writes TABLE.json, .md, .tex and .svg. What is in the folder already is not made again: a
    killed run goes on where it stopped.
    """
    if list_tables:
        _show(as_json)
        return
    if not tables or output is None:
        raise click.UsageError("Needs a TABLE, or all, and -o FOLDER; or --list.")
    from knn_moe.reproduce.reproduce import chosen_tables, reproduce
    from knn_moe.reproduce.study import Study
    from knn_moe.routers.find import find_routers

    names, plan = chosen_tables(tables), _plan(options)
    device = pick_device(options["device"])
    if device.type != "cpu" and options["jobs"] > 1:
        raise click.UsageError(f"--jobs is for a CPU, and this runs on {device}.")
    for name in plan.models:
        find_routers(load_structure(name))  # what cannot be loaded is told before anything runs
    load = Loader(options["device"], usual_dtype(options["device"], options["dtype"]))
    made = []
    with progress_bar("reproduce") as update:

        def step(what: str, done: int, total: int) -> None:
            update(done, total, what)

        study = Study(plan, output, load, step, device, load.dtype, options["jobs"])
        for table in reproduce(study, names):
            made.append(table)
            log.print(f"{table.title}: {output / table.name}.md")
    if as_json:
        print_json([table.to_dict() for table in made])
        return
    for table in made:
        rows = [[cell.text for cell in row] for row in table.rows]
        print_table(table.title, table.columns, rows)


@dataclass(frozen=True)
class Loader:
    """Loads models, in another process as well."""

    device: str | None
    dtype: str

    def __call__(self, name: str) -> tuple[Any, Any]:
        return load_model(name, self.device, self.dtype)


def _plan(options: Any) -> Plan:
    from knn_moe.reproduce.plan import Plan

    given = {
        name: options[name]
        for name in ("models", "tasks", "limit", "reference")
        if options[name] not in (None, ())
    }
    given |= {name: options[name] for name in ("data", "seed", "batch_size")}
    if not options["as_printed"]:
        return Plan(**given)
    if not options["models"]:
        raise click.UsageError("--as-printed asks in words, for which --model must name a model.")
    return Plan.of_the_paper(given.pop("models"), given.pop("data"), **given)


def _show(as_json: bool) -> None:
    from knn_moe.reproduce.reproduce import TABLES

    rows = [(name, entry.title, entry.where) for name, entry in TABLES.items()]
    if as_json:
        print_json([{"name": name, "title": title, "paper": where} for name, title, where in rows])
        return
    print_table(None, ("table", "title", "in the paper"), rows)
