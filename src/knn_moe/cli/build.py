"""`knn-moe build`: build a memory from a reference set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click
from click.core import ParameterSource

from knn_moe.cli.calibrate import show_calibration
from knn_moe.cli.common import (
    PATH,
    json_option,
    load_model,
    model_options,
    output_option,
    pick_given,
    print_note,
    show_progress,
    show_written,
)
from knn_moe.cli.distil import show_distillation
from knn_moe.cli.reference import open_reference, reference_options
from knn_moe.errors import BuildError, ConfigError

if TYPE_CHECKING:
    from knn_moe.adapt.calibrate.result import Calibration
    from knn_moe.adapt.distil.result import Distillation
    from knn_moe.config import BuildConfig
    from knn_moe.memory.memory import RoutingMemory
    from knn_moe.reference.load import ReferenceSet

Inputs: TypeAlias = tuple[
    Any, Any, "ReferenceSet", "BuildConfig"
]  # model, tokenizer, reference, config
_CONFIG: Final = (
    "preset", "steps", "learning_rate", "gradient", "tokens", "loss", "max_length",
    "batch_tokens",
)  # fmt: skip


@click.command(name="build")
@click.argument("model")
@click.argument("reference", type=PATH)
@output_option
@click.option(
    "--preset",
    default="paper",
    show_default=True,
    help="Start from this preset: paper, as published. To have settings chosen on your examples, "
    "use --calibrate.",
)
@click.option(
    "--steps", type=int, help="Take this many gradient steps (S) per token. Default: the preset's."
)
@click.option(
    "--learning-rate", type=float, help="Size of a gradient step (η). Default: the preset's."
)
@click.option(
    "--gradient",
    help="Send gradients through the chosen experts (sparse) or through all experts (dense). "
    "Default: the preset's.",
)
@click.option(
    "--tokens",
    default="all",
    show_default=True,
    help="Remember all tokens (all), or only those that predict a completion (completion).",
)
@click.option(
    "--loss",
    help="Lower the loss of all tokens (all), or only of completions (completion). Default: that "
    "of the tokens that are remembered.",
)
@click.option(
    "--max-length",
    default=2048,
    show_default=True,
    help="Cut longer texts into windows of this many tokens.",
)
@click.option(
    "--batch-tokens", default=8192, show_default=True, help="Process this many tokens at a time."
)
@click.option(
    "--calibrate",
    is_flag=True,
    help="Train the values, and choose the tokens and the use of the memory, on held-out examples.",
)
@click.option(
    "--head",
    is_flag=True,
    help="With --calibrate: also predict the next token from what followed the nearest cases.",
)
@click.option(
    "--distil",
    is_flag=True,
    help="Learn a few prototypes that stand for all cases, and keep only these.",
)
@click.option(
    "--prototypes",
    type=int,
    help="With --distil: learn this many prototypes for each layer. Default: 1024.",
)
@click.option(
    "--append",
    type=PATH,
    help="Add the examples to this memory, and build them the way it was built.",
)
@click.option("--resume", is_flag=True, help="Continue a build that was interrupted.")
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace a memory in the output folder when the new one is complete.",
)
@reference_options
@model_options
@json_option
def command(model: str, reference: Path, output: Path, as_json: bool, **options: Any) -> None:
    """Build a memory for MODEL from the REFERENCE set.

    \b
    knn-moe build tiny-olmoe reference.jsonl -o memory
    knn-moe build allenai/OLMoE-1B-7B-0125-Instruct reference.jsonl.gz -o memory --calibrate
    knn-moe build tiny-olmoe reference.jsonl -o small --distil
    knn-moe build tiny-olmoe reference.jsonl -o memory --resume
    knn-moe build tiny-olmoe more.jsonl --append memory -o memory --overwrite
    knn-moe build tiny-olmoe questions.csv -o memory --column question=q --column answer=a
    cat notes.txt | knn-moe build tiny-olmoe - -o memory

    MODEL is an embedded model, a folder or a hub id. REFERENCE is a file (.jsonl, .json, .csv,
    .tsv, .parquet, .txt or .md; all but .parquet also .gz), a folder of such files, - for standard
    input, or a data set of the hub, as ORG/NAME or ORG/NAME:SPLIT. Rows may be texts, prompts with
    completions, questions with answers, instructions, or conversations; plain text is split at
    blank lines. An interrupted build leaves OUTPUT.partial, from which --resume continues.
    """
    _check_combination(options)
    earlier = None if options["append"] is None else _open_appendable(options["append"])
    config = _build_config(options, earlier)
    _check_output(output, options)
    examples = open_reference(reference, options)
    network, tokenizer = load_model(model, options["device"], options["dtype"])
    inputs = (network, tokenizer, examples, config)
    found: Calibration | Distillation | None = None
    if earlier is not None:
        _check_same_model(network, earlier)
        memory = _append(earlier, inputs, output, options["overwrite"])
    elif options["distil"]:
        memory, found = _build_distilled(inputs, output, options)
    else:
        memory, found = _build(inputs, output, options)
    report = {"calibration": found.report()} if found else {}
    if found and not as_json:
        _show_found(found)
    show_written(memory, output, as_json=as_json, layers=sorted(memory.layers), **report)


def _build(
    inputs: Inputs, folder: Path, options: Mapping[str, Any]
) -> tuple[RoutingMemory, Calibration | None]:
    from knn_moe.adapt.calibrate.build_calibrated import build_calibrated
    from knn_moe.build.build import build_memory
    from knn_moe.config import CalibrationConfig

    overwrite = options["overwrite"]
    with show_progress("Building") as report:
        if not options["calibrate"]:
            memory = build_memory(*inputs, folder=folder, overwrite=overwrite, on_progress=report)
            return memory, None
        calibration = CalibrationConfig(head=options["head"])
        return build_calibrated(
            *inputs, calibration, folder=folder, overwrite=overwrite, on_progress=report
        )


def _show_found(found: Calibration | Distillation) -> None:
    from knn_moe.adapt.distil.result import Distillation

    if isinstance(found, Distillation):
        show_distillation(found)
    else:
        show_calibration(found)


def _build_distilled(
    inputs: Inputs, folder: Path, options: Mapping[str, Any]
) -> tuple[RoutingMemory, Distillation]:
    from knn_moe.adapt.distil.distil import build_distilled
    from knn_moe.config import DistilConfig

    config = DistilConfig(**pick_given(options, "prototypes"))
    with show_progress("Distilling") as report:
        return build_distilled(
            *inputs, config, folder=folder, overwrite=options["overwrite"], on_progress=report
        )


def _check_combination(options: Mapping[str, Any]) -> None:
    """Refuse options that contradict each other."""
    if options["head"] and not options["calibrate"]:
        raise click.UsageError("--head is chosen on held-out examples. Add --calibrate.")
    if options["prototypes"] is not None and not options["distil"]:
        raise click.UsageError("--prototypes is for distilled memories. Add --distil.")
    ways = [name for name in ("calibrate", "distil") if options[name]]
    if not ways:
        return
    if len(ways) > 1:
        raise click.UsageError(
            "--calibrate and --distil contradict each other: prototypes learn by themselves. "
            "Leave one out."
        )
    (way,) = ways
    if options["append"] is not None:
        raise click.UsageError(
            f"--append and --{way} cannot be combined. Append first, then run knn-moe {way} on "
            f"the result."
        )
    if options["distil"] and options["resume"]:
        raise click.UsageError(
            "--distil keeps no part of a build that could be continued. Leave out --resume, or "
            "build first and run knn-moe distil afterwards."
        )
    if options["distil"] and options["loss"] is not None:
        raise click.UsageError(
            f"--distil learns completions where there are prompts, and all tokens otherwise, but "
            f"--loss {options['loss']} was given. Leave it out."
        )
    for name, value in pick_given(options, "steps", "learning_rate", "gradient").items():
        raise click.UsageError(
            f"--{way} chooses {name} itself, but {value} was given. Leave one out, or build "
            f"first and run knn-moe {way} afterwards."
        )


def _open_appendable(folder: Path) -> RoutingMemory:
    """Open the memory to append to, which needs its keys and the values of its own build."""
    from knn_moe.memory.memory import RoutingMemory

    memory = RoutingMemory.from_pretrained(str(folder))  # a Path would be no hub id
    memory.full_layers()
    if memory.manifest.values_trained:
        raise ConfigError(
            f"The values of {str(folder)!r} were trained on its own examples, so new ones cannot "
            f"be appended. Build a memory from all examples with --calibrate."
        )
    return memory


def _check_same_model(model: Any, memory: RoutingMemory) -> None:
    """Refuse a model that the memory was not built for, or one in another precision."""
    from knn_moe.inference.attach import check_belongs

    check_belongs(model, memory)
    dtype = next(iter(memory.layers.values())).shape.dtype
    if model.dtype != dtype:
        raise ConfigError(
            f"The memory to append to has {dtype} keys, but the model was loaded as "
            f"{model.dtype}. Choose the same precision with --dtype."
        )


def _build_config(options: Mapping[str, Any], earlier: RoutingMemory | None) -> BuildConfig:
    """Return the config that was asked for, or to append, the one of the earlier memory."""
    from knn_moe.config import BuildConfig

    given = pick_given(options, *_CONFIG)
    if earlier is None:
        return BuildConfig(**given)
    source = click.get_current_context().get_parameter_source
    given = {name: given[name] for name in given if source(name) is not ParameterSource.DEFAULT}
    batch_tokens = given.pop("batch_tokens", earlier.build.batch_tokens)  # changes no result
    for name, value in given.items():
        expected = getattr(earlier.build, name)
        if value != expected:
            raise ConfigError(
                f"The memory to append to was built with {name} {expected}, but {value} was given. "
                f"Leave it out, or build a separate memory and merge the two."
            )
    return replace(earlier.build, batch_tokens=batch_tokens)


def _append(earlier: RoutingMemory, inputs: Inputs, output: Path, overwrite: bool) -> RoutingMemory:
    """Build the new cases apart, and write both memories as one to `output`.

    Appending in place once more, as after a kill, changes nothing: the examples are found there.
    """
    from knn_moe.build.append import append

    with show_progress("Building") as report:
        whole = append(earlier, *inputs, folder=output, overwrite=overwrite, on_progress=report)
    if len(whole) == len(earlier):
        print_note("The memory holds these examples already, so nothing was appended.")
    elif earlier.manifest.calibration is not None:
        print_note("The calibration was for fewer examples and was removed. Calibrate again.")
    return whole


def _check_output(output: Path, options: Mapping[str, Any]) -> None:
    """Refuse an output folder that is occupied, before the model is loaded."""
    from knn_moe.build.workspace import discard, partial_folder, refuse_strangers
    from knn_moe.memory.files import refuse_existing

    partial, overwrite = partial_folder(output), options["overwrite"]
    if partial.is_dir() and not options["resume"]:
        refuse_strangers(partial)
        if not overwrite:
            ways = "Use --resume to continue it, or --overwrite to start again."
            if options["distil"]:
                ways = "Use --overwrite to discard it."
            raise BuildError(f"{str(partial)!r} contains an unfinished build. {ways}")
        refuse_existing(output, overwrite=True)
        discard(output)
    if not partial.exists():
        refuse_existing(output, overwrite=overwrite)
