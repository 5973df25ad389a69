"""`knn-moe build`: a memory from a reference set."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from knn_moe.cli.calibrate import show_calibration
from knn_moe.cli.common import (
    device_option,
    dtype_option,
    json_option,
    load_model,
    log,
    print_json,
    progress_bar,
)
from knn_moe.errors import BuildError, ConfigError

if TYPE_CHECKING:
    from knn_moe.adapt.calibrate.result import Calibration
    from knn_moe.config import BuildConfig
    from knn_moe.memory.memory import RoutingMemory
    from knn_moe.reference.examples import Example


@click.command(name="build")
@click.argument("model")
@click.argument("reference", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="New folder.")
@click.option(
    "--preset", default="paper", show_default=True, help="Settings to start from: paper or strong."
)
@click.option("--steps", type=int, help="Gradient steps per token (S).")
@click.option("--learning-rate", type=float, help="Size of a step (η).")
@click.option("--gradient", help="sparse: through the chosen experts; dense: through all.")
@click.option("--tokens", default="all", show_default=True, help="all, or completion only.")
@click.option("--max-length", default=2048, show_default=True, help="Tokens in a window.")
@click.option("--batch-tokens", default=8192, show_default=True, help="Tokens in a batch.")
@click.option("--calibrate", is_flag=True, help="Choose all of these, and how it is used, by data.")
@click.option("--head", is_flag=True, help="With --calibrate: also tell the next token.")
@click.option("--append", type=click.Path(path_type=Path), help="Memory to add the examples to.")
@click.option("--resume", is_flag=True, help="Go on where a killed build stopped.")
@click.option("--overwrite", is_flag=True, help="Replace an existing memory once this is whole.")
@device_option
@dtype_option
@json_option
def command(
    model: str,
    reference: Path,
    output: Path,
    calibrate: bool,
    head: bool,
    append: Path | None,
    resume: bool,
    overwrite: bool,
    device: str | None,
    dtype: str,
    as_json: bool,
    **settings: Any,
) -> None:
    """Build a memory of the REFERENCE set for MODEL, a folder or a hub id.

    \b
    knn-moe build allenai/OLMoE-1B-7B-0125-Instruct ref.jsonl -o memory
    knn-moe build ./my-model ref.jsonl.gz -o memory --steps 3 --learning-rate 0.5
    knn-moe build ./my-model ref.jsonl -o memory --calibrate
    knn-moe build ./my-model ref.jsonl -o memory --resume
    knn-moe build ./my-model more.jsonl --append memory -o memory --overwrite

    REFERENCE is .jsonl or .jsonl.gz with "text", "prompt" and "completion", or "messages" on each
    line; or .txt, which is one text. Long texts are cut into windows. A killed build leaves
    OUTPUT.partial, from which --resume goes on. --calibrate chooses η, S and the gradient on a
    sample of REFERENCE, builds with them, and goes on as `knn-moe calibrate` does, with --head as
    there. --append builds as that memory was built, and writes its cases and the new ones as one
    memory of one γ; where that has several domains, the new ones are another.
    """
    from knn_moe.memory.files import publish, refuse_existing
    from knn_moe.reference.examples import iter_examples

    _check_asked(append, settings, calibrate=calibrate, head=head)
    earlier = None if append is None else _open(append)
    config = _settings(settings, earlier)
    refuse_existing(output, overwrite=overwrite)
    target = _target(output, resume=resume, overwrite=overwrite, apart=earlier is not None)
    for _ in iter_examples(reference):  # a bad reference file is told before the model loads
        pass
    network, tokenizer = load_model(model, device, dtype)
    if earlier is not None:
        _check_appendable(network, earlier)  # told before the work
    build = partial(_build_calibrated, head=head) if calibrate else _build
    memory, found = build(network, tokenizer, iter_examples(reference), config, target)
    if earlier is not None:
        memory = _appended(earlier, memory, output, overwrite=overwrite)
    elif target != output:
        publish(target, output, overwrite=True)
    _show(memory, found, output, as_json=as_json)


def _show(memory: RoutingMemory, found: Calibration | None, output: Path, *, as_json: bool) -> None:
    if as_json:
        facts = {"folder": str(output), "cases": len(memory), "bytes": memory.nbytes}
        worth = {"calibration": found.report()} if found else {}
        print_json({**facts, "layers": sorted(memory.layers), **worth})
    else:
        if found:
            show_calibration(found)
        log.print(f"{memory!r}\n{memory.nbytes / 1e6:,.1f} MB in {output}")


def _build(
    model: Any, tokenizer: Any, examples: Iterable[Example], config: BuildConfig, folder: Path
) -> tuple[RoutingMemory, None]:
    from knn_moe.build.build import BuildProgress, build_memory

    with progress_bar("Building") as update:

        def show(progress: BuildProgress) -> None:
            rate = (progress.tokens - progress.resumed_tokens) / max(progress.seconds, 1e-9)
            note = f"{rate:,.0f} tokens/s" if progress.stage == "optimise" else progress.stage
            update(progress.tokens, progress.total_tokens, note)

        memory = build_memory(model, tokenizer, examples, config, folder=folder, on_progress=show)
    return memory, None


def _build_calibrated(
    model: Any,
    tokenizer: Any,
    examples: Iterable[Example],
    config: BuildConfig,
    folder: Path,
    *,
    head: bool,
) -> tuple[RoutingMemory, Calibration]:
    from knn_moe.adapt.calibrate.build_calibrated import build_calibrated
    from knn_moe.adapt.calibrate.config import CalibrationConfig

    with progress_bar("Building") as update:
        return build_calibrated(
            model,
            tokenizer,
            examples,
            config,
            CalibrationConfig(head=head),
            folder=folder,
            on_progress=lambda what, done, total: update(done, total, what),
        )


def _check_asked(
    append: Path | None, settings: dict[str, Any], *, calibrate: bool, head: bool
) -> None:
    """Refuse what does not go with, or without, --calibrate."""
    if not calibrate:
        if head:
            raise ConfigError("--head is chosen by data: ask for it with --calibrate.")
        return
    if append is not None:
        raise ConfigError(
            "--append and --calibrate do not go together: append first, then calibrate the whole."
        )
    for name in ("steps", "learning_rate", "gradient"):
        if settings[name] is not None:
            raise ConfigError(
                f"--calibrate chooses {name}, and {settings[name]} was asked for: leave one out, "
                f"or build first and `knn-moe calibrate` then."
            )


def _open(folder: Path) -> RoutingMemory:
    """The memory to append to; refused where it has no keys to compute γ from, or where values
    were fitted that the new examples would have to have a part in."""
    from knn_moe.memory.memory import RoutingMemory

    memory = RoutingMemory.from_pretrained(folder)
    memory.full_layers()
    if memory.manifest.learned:
        raise ConfigError(
            f"The values of {str(folder)!r} were fitted to all its examples: build a memory of "
            f"these and the new ones with --calibrate."
        )
    return memory


def _check_appendable(model: Any, memory: RoutingMemory) -> None:
    """Of this model, and of its precision."""
    from knn_moe.inference.attach import check_belongs

    check_belongs(model, memory)
    has = next(iter(memory.layers.values())).shape.dtype
    if model.dtype != has:
        raise ConfigError(
            f"The memory to append to has keys of {has}, and the model was loaded as "
            f"{model.dtype}: load it alike, with --dtype."
        )


def _settings(given: dict[str, Any], earlier: RoutingMemory | None) -> BuildConfig:
    """What was asked for; to append, what the memory was built with, and nothing else."""
    from knn_moe.config import BuildConfig

    context = click.get_current_context()
    if earlier is None:
        return BuildConfig(**{name: value for name, value in given.items() if value is not None})
    asked = {
        name: value
        for name, value in given.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    batch_tokens = asked.pop("batch_tokens", earlier.build.batch_tokens)  # changes no result
    for name, value in asked.items():
        has = getattr(earlier.build, name)
        if value != has:
            raise ConfigError(
                f"The memory to append to was built with {name} {has}, and {value} was asked for: "
                f"leave it out, or build a memory of its own and merge them."
            )
    return replace(earlier.build, batch_tokens=batch_tokens)


def _appended(
    earlier: RoutingMemory, new: RoutingMemory, output: Path, *, overwrite: bool
) -> RoutingMemory:
    """Both as one memory in `output`; the folder of `new` goes when that is whole.

    Of one domain, as one build of both is. Of several nobody says which the new ones belong to:
    they are a domain of their own.
    """
    with log.status("Appending"):
        whole = earlier.merge(new, folder=output, overwrite=overwrite)
    if new.folder is not None:
        shutil.rmtree(new.folder)
    if earlier.manifest.calibration is not None:
        log.print("Its calibration was for fewer examples and is forgotten: calibrate it again.")
    return whole


def _target(output: Path, *, resume: bool, overwrite: bool, apart: bool) -> Path:
    """The folder to build in: what is replaced stays until the new memory is whole, and what is to
    be appended is built `apart`."""
    from knn_moe.build.checkpoint import partial_folder
    from knn_moe.memory.files import refuse_existing

    beside = apart or (overwrite and output.exists())
    target = output.with_name(f"{output.name}.new") if beside else output
    left = partial_folder(target)
    if overwrite and not resume:
        shutil.rmtree(left, ignore_errors=True)
        if target != output:
            refuse_existing(target, overwrite=True)
            shutil.rmtree(target, ignore_errors=True)
    elif left.exists() and not resume:
        raise BuildError(
            f"{str(left)!r} holds part of an earlier build: pass --resume to go on with it, or "
            f"--overwrite to start over."
        )
    return target
