"""`knn-moe reproduce pretrained`: study the method on pretrained models, in slices."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from knn_moe.cli.common import (
    PATH,
    POSITIVE,
    data_option,
    evaluation_dtype,
    json_option,
    load_model,
    model_options,
    pick_given,
    print_json,
    print_note,
    print_table,
    print_text,
    program_options,
    seed_option,
    show_progress,
)
from knn_moe.routers.load import load_structure, pick_device

if TYPE_CHECKING:
    from knn_moe.evaluation.store import Run
    from knn_moe.reproduce.pretrained.plan import RunSpec
    from knn_moe.reproduce.pretrained.study import PretrainedStudy

_PARTS: Final = ("accuracy", "text", "growth", "transfer", "together", "generation")
_SPEED: Final = 300_000  # tokens a second: a guess for half a billion parameters on an H200
_FIELDS: Final = (
    "models", "parts", "tasks", "methods", "reference", "texts", "sizes", "limit", "seed", "data",
    "batch_tokens", "build_tokens", "one_rate",
)  # fmt: skip


@dataclass(frozen=True)
class Loader:
    """Load a model by name. Unlike a closure, it can be sent to another process."""

    device: str | None
    dtype: str
    places: Mapping[str, str] = field(default_factory=dict)  # of models by their last names

    def __call__(self, name: str) -> tuple[Any, Any]:
        return load_model(self.places.get(name, name), self.device, self.dtype)


@click.command(name="pretrained")
@click.option(
    "--model", "models", multiple=True, required=True, help="Use this model. Can be repeated."
)
@click.option(
    "-o", "--output", type=PATH, required=True, help="Write tables and runs to this folder."
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(_PARTS),
    help="Make this part. Can be repeated. Default: all but generation.",
)
@click.option(
    "-t",
    "--task",
    "tasks",
    multiple=True,
    help="Use this task. Can be repeated. Default: eleven benchmarks, five texts, gsm8k, mbpp.",
)
@click.option(
    "-m",
    "--method",
    "methods",
    multiple=True,
    help="Use this method. Can be repeated. Default: ten of them.",
)
@data_option
@click.option(
    "--reference", type=POSITIVE, help="Learn from so many questions of a task. Default: 500."
)
@click.option("--texts", type=POSITIVE, help="Learn from so many texts of a task. Default: 200.")
@click.option(
    "--size",
    "sizes",
    type=POSITIVE,
    multiple=True,
    help="A number of rows for the part growth. Can be repeated. Default: 30 to 2,000.",
)
@click.option("--limit", type=POSITIVE, help="Ask at most so many questions. Default: all.")
@seed_option("every random choice")
@click.option(
    "--batch-tokens", type=POSITIVE, help="Read so many tokens at a time. Default: 65,536."
)
@click.option(
    "--build-tokens",
    type=POSITIVE,
    help="The same while a memory is built, which takes more GPU memory. Default: 8,192.",
)
@click.option(
    "--one-rate",
    is_flag=True,
    help="Search fine-tuning's learning rate on the first task only, and use it for the others.",
)
@click.option(
    "--jobs",
    type=POSITIVE,
    default=1,
    show_default=True,
    help="Run this many processes, each with the model in its memory; fewer for what does not fit.",
)
@click.option("--minutes", type=float, help="Begin no run after so many minutes.")
@click.option("--no-tables", is_flag=True, help="Make runs only.")
@click.option("--no-runs", is_flag=True, help="Make tables only, from the runs that are there.")
@click.option("--count", is_flag=True, help="Only count the tokens of each task.")
@program_options
@model_options
@json_option
def pretrained(output: Path, as_json: bool, **options: Any) -> None:
    """Study the method on pretrained models: whole test sets, every method.

    \b
    knn-moe reproduce pretrained --model smol-moe -o study --part accuracy -t sciq -t arc_easy
    knn-moe reproduce pretrained --model smol-moe -o study --part text --minutes 9 --no-tables
    knn-moe reproduce pretrained --model smol-moe -o study --no-runs
    knn-moe reproduce pretrained --model smol-moe -o study --count

    Each model, task and method is a run of its own, kept in the folder and never made twice. Runs
    may be made on several machines and their folders put together. Tables are made from the runs
    that are there, and say which are missing.
    """
    deadline = None if options["minutes"] is None else time.monotonic() + 60 * options["minutes"]
    study = _make_study(output, options)
    if options["count"]:
        _count(study, options["models"][0], as_json)
        return
    if not options["no_runs"]:
        study.check(options["parts"], options["methods"])
        _make_runs(study, deadline, options["jobs"])
    tables = []
    if not options["no_tables"]:
        from knn_moe.reproduce.pretrained.make import make_tables

        tables = make_tables(study)
    if as_json:
        print_json([table.to_dict() for table in tables])
        return
    for table in tables:
        print_text(f"{table.title}: {output / table.name}.md")


def _make_study(output: Path, options: dict[str, Any]) -> PretrainedStudy:
    from knn_moe.reproduce.pretrained.plan import PretrainedPlan
    from knn_moe.reproduce.pretrained.study import PretrainedStudy
    from knn_moe.routers.find import find_routers

    # By their last names, because tables may be made where a model's folder is not.
    models = {Path(model).name: model for model in options["models"]}
    if len(models) < len(options["models"]):
        raise click.UsageError(f"Two models have the same name: {', '.join(options['models'])}.")
    plan = PretrainedPlan(**pick_given({**options, "models": tuple(models)}, *_FIELDS))
    if not options["no_runs"]:
        for model in models.values():
            find_routers(load_structure(model))  # refuses a bad model before anything runs
    dtype = evaluation_dtype(options["device"], options["dtype"])
    load = Loader(options["device"], dtype, models)
    return PretrainedStudy(plan, output, load, pick_device(options["device"]), dtype)


def _make_runs(study: PretrainedStudy, deadline: float | None, jobs: int) -> None:
    from knn_moe.reproduce.pretrained.processes import make_runs_in_processes
    from knn_moe.reproduce.results import left_out

    for reason in left_out(study.plan.methods):
        print_note(reason)
    with show_progress("Studying") as report:
        study.on_progress = report
        runs = study.make_runs(deadline)
        if jobs > 1:
            runs = make_runs_in_processes(study, jobs, deadline)
        for spec, run in runs:
            print_note(_describe(spec, run))
    for failure in study.failures:
        print_note(f"Failed: {failure}")
    missing = study.missing()
    if missing:
        print_note(
            f"{len(missing)} runs are missing. The same command continues with {missing[0]}."
        )


def _describe(spec: RunSpec, run: Run) -> str:
    """Return the result of a run in a line."""
    from knn_moe.evaluation.compare import summarise

    line = summarise(run)
    shown = f"{line.nll:.3f} nats" if line.scoring == "text" else f"{line.score.mean:.1%}"
    shown += "" if line.chance is None else f" (chance {line.chance:.1%})"
    shown += "" if line.unparsed_share is None else f", {line.unparsed_share:.1%} unparsed"
    prepared = run.facts.get("preparation_seconds", 0.0)
    return (
        f"{spec}: {shown}; prepared in {prepared:.1f} s, answered in {run.facts['seconds']:.1f} s"
    )


def _count(study: PretrainedStudy, model: str, as_json: bool) -> None:
    from transformers import AutoTokenizer

    from knn_moe.reproduce.pretrained.make import count_tokens
    from knn_moe.support.embedded_models import embedded_model

    tokenizer = AutoTokenizer.from_pretrained(embedded_model(model))
    rows = list(count_tokens(study, tokenizer))
    rows.append(("all", *(sum(column) for column in list(zip(*rows, strict=True))[1:])))
    if as_json:
        columns = ("task", "questions", "tokens", "batches")
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    shown = [
        (task, f"{questions:,}", f"{tokens:,}", f"{batches:,}", f"{tokens / _SPEED:.1f}")
        for task, questions, tokens, batches in rows
    ]
    speed = f"s at {_SPEED:,} tokens/s"
    print_table(None, ("task", "questions", "tokens", "batches", speed), shown)
