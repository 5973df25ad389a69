"""`knn-moe eval`: evaluate a model on benchmarks."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from knn_moe.cli.common import (
    PATH,
    POSITIVE,
    batch_size_option,
    complete_methods,
    complete_tasks,
    data_option,
    evaluation_dtype,
    json_option,
    load_model,
    model_options,
    pick_given,
    print_json,
    print_note,
    print_table,
    program_options,
    seed_option,
    show_progress,
)

if TYPE_CHECKING:
    from knn_moe.evaluation.evaluate import EvalConfig, QuestionSet
    from knn_moe.evaluation.store import Run
    from knn_moe.methods import TaskContext
    from knn_moe.tasks.data import TaskData

DEFAULT = ("zero-shot", "knn")
Chosen: TypeAlias = tuple[str, str | None]  # a method's name, and a control of its memory


@click.command(name="eval")
@click.argument("model", required=False)
@click.option(
    "-t",
    "--task",
    "tasks",
    multiple=True,
    shell_complete=complete_tasks,
    help="Evaluate on this task: a name from --list, or a file of questions or of text (.jsonl, "
    ".json, .csv, .tsv, .parquet, .txt or .md). Can be repeated.",
)
@click.option(
    "-m",
    "--method",
    "methods",
    multiple=True,
    shell_complete=complete_methods,
    help="Evaluate this method from --list. Can be repeated. Default: zero-shot and knn.",
)
@click.option(
    "--control",
    "controls",
    multiple=True,
    help="Also evaluate knn with one part of its memory broken on purpose: shuffled (values), "
    "random (neighbours) or own-logits (no optimisation). Can be repeated.",
)
@click.option("-o", "--output", type=PATH, help="Write runs to this folder.")
@click.option(
    "--memory",
    help="Use this memory for knn: a folder or a hub id. Default: build and calibrate one from the "
    "task's reference set.",
)
@click.option(
    "--preset",
    help="Build the memory with this preset, paper, instead of calibrating it.",
)
@click.option(
    "--reference",
    type=POSITIVE,
    help="Use this many rows of the reference set, chosen at random. Default: all.",
)
@click.option("--index", help="Search the memory with exact, faiss-flat, ivfpq or fast.")
@click.option(
    "--scoring",
    help="Score by generation, likelihood or text. Default: as usual for the task; choices by "
    "likelihood if the model has no chat template.",
)
@data_option
@click.option("--limit", type=int, help="Ask this many questions, chosen at random. Default: all.")
@seed_option("every random choice")
@batch_size_option
@click.option(
    "--max-new-tokens", type=int, help="Generate at most this many tokens. Default: the task's."
)
@click.option("--load", is_flag=True, help="Also measure the load-balancing loss of the routers.")
@click.option("--resume", is_flag=True, help="Continue runs that were interrupted.")
@click.option("--overwrite", is_flag=True, help="Replace runs in the output folder.")
@click.option("--list", "list_tasks", is_flag=True, help="List the tasks and the methods.")
@program_options
@model_options
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
    """Evaluate MODEL on tasks, with and without a memory, and save every answer.

    \b
    knn-moe eval --list
    knn-moe eval tiny-olmoe -t arc_easy -m zero-shot -m knn -o runs
    knn-moe eval tiny-olmoe -t medmcqa -t mmlu --memory memory -o runs --limit 500
    knn-moe eval tiny-olmoe -t questions.jsonl -o runs --scoring likelihood
    knn-moe eval tiny-olmoe -t text_medical -o runs --control shuffled --control random
    knn-moe compare runs

    Without --memory, knn builds a memory from the task's reference set, which shares no question
    with the test set, and calibrates it. Where there are too few examples for that, it uses the
    paper's settings, which knn-paper always uses, and says so. On a CPU, --dtype auto means
    float32.

    A model without a chat template is asked to choose by likelihood, not to generate answers,
    unless --scoring says otherwise. What cannot work, such as C3PO on plain text, is refused before
    anything runs.
    """
    if list_tasks:
        _show_tasks(as_json)
        return
    if model is None or output is None or not tasks:
        raise click.UsageError("Give a MODEL, at least one -t TASK and -o RUNS, or use --list.")
    if options["resume"] and options["overwrite"]:
        raise click.UsageError("--resume and --overwrite cannot be combined. Choose one.")
    if options["reference"] and options["memory"]:
        raise click.UsageError(
            "--reference has no effect with --memory, which is built already. Leave one out."
        )
    if options["preset"] and options["memory"]:
        raise click.UsageError(
            "--preset has no effect with --memory, which is built already. Leave one out."
        )
    chosen = [(name, None) for name in methods or DEFAULT] + [("knn", kind) for kind in controls]
    runs = _evaluate(model, tasks, list(dict.fromkeys(chosen)), output, options)
    if as_json:
        print_json([{**run.facts, **_result(run)} for run in runs])
        return
    from knn_moe.cli.compare import show_runs

    show_runs(runs, DEFAULT[0])


def _evaluate(
    model: str, tasks: tuple[str, ...], methods: list[Chosen], output: Path, options: Any
) -> list[Run]:
    from knn_moe.evaluation.evaluate import EvalConfig, explain_scoring
    from knn_moe.evaluation.preflight import check_model
    from knn_moe.evaluation.store import RunFolder

    fields = ("scoring", "batch_size", "limit", "seed", "load", "max_new_tokens")
    config = EvalConfig(**pick_given(options, *fields))
    data = _open(tasks, methods, config, options)
    if not options["resume"] and not options["overwrite"]:
        for each, chosen in product(data, methods):
            RunFolder(output / each.task.name / _run_name(*chosen)).refuse_existing()
    network, tokenizer = _load(model, options)
    asked = check_model(network, tokenizer, data, methods, config)
    runs = []
    for each in data:
        questions = asked[each.task.name]
        reason = explain_scoring(each, config, questions.scoring)
        if reason is not None:
            print_note(f"{reason} Use --scoring generation to score generated answers.")
        context = _make_context(network, tokenizer, each, config, output, options)
        for chosen in methods:
            folder = output / each.task.name / _run_name(*chosen)
            runs.append(_evaluate_method(context, chosen, folder, config, questions, options))
    return runs


def _evaluate_method(
    context: TaskContext,
    chosen: Chosen,
    folder: Path,
    config: EvalConfig,
    asked: QuestionSet,
    options: Any,
) -> Run:
    """Prepare and evaluate a method, unless --resume finds that it is finished."""
    from knn_moe.evaluation.evaluate import evaluate, identify_run
    from knn_moe.evaluation.store import find_finished_run
    from knn_moe.methods import prepare, prepared_on

    (name, control), model, data = chosen, context.model, context.data
    facts = identify_run(model, data, config, asked.scoring)
    facts["prepared_on"] = prepared_on(name, context)
    finished = find_finished_run(folder, facts) if options["resume"] else None
    if finished is not None:
        return finished
    title = f"{data.task.name}, {folder.name}"
    with show_progress(f"{title}: preparing") as context.on_progress:
        method = prepare(name, context, control)
    while context.notes:
        print_note(context.notes.pop(0))
    with show_progress(title) as report:
        return evaluate(
            model,
            context.tokenizer,
            data,
            method,
            config,
            folder=folder,
            resume=options["resume"],
            overwrite=options["overwrite"],
            asked=asked,
            on_progress=report,
        )


def _open(
    tasks: tuple[str, ...], methods: list[Chosen], config: EvalConfig, options: Any
) -> list[TaskData]:
    """Return the rows of the tasks, and refuse what cannot be done before the model is loaded."""
    from knn_moe.adapt.controls import CONTROLS
    from knn_moe.config import BuildConfig
    from knn_moe.evaluation.preflight import check_memory, check_plan
    from knn_moe.index import IndexConfig
    from knn_moe.memory.memory import RoutingMemory
    from knn_moe.methods import METHODS
    from knn_moe.tasks import open_task
    from knn_moe.tasks.reference_set import reference_rows
    from knn_moe.tasks.sandbox import check_programs

    for _, control in methods:
        if control is not None:
            CONTROLS.find(control)
    needs = {METHODS.find(name).needs for name, _ in methods}
    if needs == {"nothing"}:
        for name in pick_given(options, "memory", "preset", "index"):
            raise click.UsageError(f"--{name} has no effect on {methods[0][0]}. Add -m knn.")
    wants_reference = "reference" in needs or ("memory" in needs and options["memory"] is None)
    data = [open_task(task, options["data"], reference=wants_reference) for task in tasks]
    names = [each.task.name for each in data]
    if len(set(names)) < len(names):
        raise click.UsageError(f"Two tasks have the same name: {', '.join(names)}. Rename a file.")
    check_programs(each.task for each in data)
    for each in data:
        if wants_reference:
            reference_rows(each)
    check_plan(data, methods, config, options["reference"])
    if options["preset"]:
        BuildConfig(preset=options["preset"])  # refuses one that is not known
    if options["index"]:
        options["index"] = IndexConfig(kind=options["index"])
    if options["memory"] is not None:
        options["memory"] = RoutingMemory.from_pretrained(options["memory"])
        check_memory(options["memory"], methods, options["index"])
    return data


def _load(model: str, options: Any) -> tuple[Any, Any]:
    from knn_moe.inference.attach import check_belongs

    network, tokenizer = load_model(
        model, options["device"], evaluation_dtype(options["device"], options["dtype"])
    )
    if options["memory"] is not None:
        check_belongs(network, options["memory"])
    return network, tokenizer


def _make_context(
    model: Any, tokenizer: Any, data: TaskData, config: EvalConfig, output: Path, options: Any
) -> TaskContext:
    from knn_moe.methods import TaskContext

    folder = output / data.task.name
    if options["overwrite"]:
        for memory in folder.glob("memory-*"):
            shutil.rmtree(memory)
    return TaskContext(
        model,
        tokenizer,
        data,
        config.scoring_for(data, tokenizer),
        limit=options["reference"],
        seed=options["seed"],
        length=config.length,
        batch_size=config.batch_size,
        **pick_given(options, "preset", "memory", "index"),
        folder=folder,
    )


def _run_name(method: str, control: str | None) -> str:
    return method if control is None else f"{method}-{control}"


def _result(run: Run) -> dict[str, float | None]:
    """Return the score of a run and what it must be read with, for JSON."""
    from knn_moe.evaluation.compare import summarise

    line = summarise(run)
    known = {name: getattr(line, name) for name in ("chance", "unparsed", "unparsed_share")}
    return {"score": line.score.mean, **known}


def _show_tasks(as_json: bool) -> None:
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
