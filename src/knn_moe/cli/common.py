"""What several commands share: loading models kindly, printing tables and JSON, progress."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from knn_moe.errors import ConfigError, ModelError, ModelTooLargeError

log = Console(stderr=True, highlight=False)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
device_option = click.option(
    "--device", default=None, help="Where to run, such as cuda:0. Default: a GPU if there is one."
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Precision to load the model in; auto takes the checkpoint's own.",
)


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(
    title: str | None, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    """To stdout; numbers to the right. The title is one line, however narrow the table."""
    table = Table(header_style="bold")
    for place, column in enumerate(columns):
        numeric = all(_is_number(row[place]) for row in rows)
        table.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console = Console(highlight=False, width=None if _is_terminal() else 120)
    if title is not None:
        console.print(title, style="italic", markup=False, soft_wrap=True)
    console.print(table)


def _is_number(cell: object) -> bool:
    text = str(cell).replace(",", "").replace("%", "").replace("×", "").strip()
    try:
        float(text.split()[0] if text else "x")
    except ValueError:
        return text in ("", "-")
    return True


def _is_terminal() -> bool:
    return Console().is_terminal


def pick_device(name: str | None) -> Any:
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"Cannot run on device {name!r}: {reason}") from None
    return device


def usual_dtype(device_name: str | None, dtype: str) -> str:
    """As asked. A CPU takes ten times as long for bfloat16, in the many shapes that questions have:
    there it is float32 unless asked otherwise."""
    on_cpu = pick_device(device_name).type == "cpu"
    return "float32" if dtype == "auto" and on_cpu else dtype


def load_model(name: str, device_name: str | None, dtype: str) -> tuple[Any, Any]:
    """A causal language model and its tokenizer: embedded, from a folder or from the hub."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from knn_moe.routers.find import find_routers
    from knn_moe.support.embedded_models import embedded_model

    device = pick_device(device_name)
    structure = load_structure(name)
    find_routers(structure)  # a model without any is told before its weights are read
    _require_room(name, structure, device, dtype)
    try:
        with log.status(f"Loading {name}"):
            place = embedded_model(name)
            tokenizer = AutoTokenizer.from_pretrained(place)
            model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype).to(device).eval()
    except (torch.OutOfMemoryError, MemoryError):
        raise ModelTooLargeError(f"{name!r} does not fit on {device}.") from None
    except Exception as error:  # transformers, safetensors and the hub each have their own
        raise _cannot_load(name, error) from None
    if not tokenizer.get_vocab():
        raise ModelError(f"{name!r} has no tokenizer: its vocabulary is empty.")
    return model, tokenizer


def read_prompt(tokenizer: Any, prompt: str, chat: bool, device: Any) -> dict[str, Any]:
    """What `generate` takes of a prompt, by way of the chat template if `chat`."""
    if chat and tokenizer.chat_template is None:
        raise ModelError("The model has no chat template: leave out --chat.")
    if chat:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    if not inputs["input_ids"].numel():
        raise ConfigError("The prompt holds no tokens.")
    return {name: inputs[name].to(device) for name in inputs if name != "token_type_ids"}


def pad_token(tokenizer: Any) -> int:
    """The one to fill up with, whether or not the tokenizer names one."""
    chosen = (
        tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    )
    return int(chosen or 0)


def load_structure(name: str) -> Any:
    """The same model without its weights, on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from knn_moe.support.embedded_models import EMBEDDED_MODELS, embedded_model

    meant = get_close_matches(name, EMBEDDED_MODELS, n=1, cutoff=0.7)
    if meant and name not in EMBEDDED_MODELS and not Path(name).exists():
        raise ModelError(
            f"Unknown model {name!r}. Did you mean {meant[0]!r}? Embedded: "
            f"{', '.join(EMBEDDED_MODELS)}; or give a folder or a hub id."
        )

    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise ModelError(
            f"Cannot load a causal language model from {name!r}: there is no such folder. "
            f"Embedded: {', '.join(EMBEDDED_MODELS)}; or give a folder or a hub id."
        )
    try:
        config = AutoConfig.from_pretrained(embedded_model(name))
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except Exception as error:  # transformers, safetensors and the hub each have their own
        raise _cannot_load(name, error) from None


def _cannot_load(name: str, error: Exception) -> ModelError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    return ModelError(f"Cannot load a causal language model from {name!r}: {reason}")


def _require_room(name: str, structure: Any, device: Any, dtype: str) -> None:
    """Refuse weights that outgrow memory before reading them. They pass through RAM to a GPU."""
    import torch

    chosen = structure.dtype if dtype == "auto" else getattr(torch, dtype)
    needed = sum(parameter.numel() for parameter in structure.parameters()) * chosen.itemsize
    rooms = {"this machine": available_memory()}
    if device.type == "cuda":
        rooms[str(device)] = torch.cuda.mem_get_info(device)[0]
    for place, free in rooms.items():
        if needed > free:
            raise ModelTooLargeError(
                f"{name!r} has {needed / 1e9:,.3g} GB of weights, and {place} has "
                f"{free / 1e9:,.3g} GB free. Use a machine with more memory, or a smaller model."
            )


def available_memory() -> int:
    """Bytes of RAM that can be had now."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62  # not known on this system


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr; yields update(done, total, note)."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %  {task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=log, transient=False) as bar:
        task = bar.add_task(description, total=None, note="")

        def update(done: int, total: int, note: str = "") -> None:
            bar.update(task, completed=done, total=total, note=note)

        yield update
