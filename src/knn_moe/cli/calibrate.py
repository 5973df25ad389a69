"""`knn-moe calibrate`: choose how a memory is used, on its own reference set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from knn_moe.cli.common import (
    PATH,
    force_option,
    json_option,
    load_model,
    model_options,
    overwrite_option,
    pick_given,
    print_json,
    print_note,
    print_table,
    show_progress,
)
from knn_moe.cli.inspect import WIDTH_COLUMNS, width_cells
from knn_moe.cli.reference import OPTIONS, open_reference, reference_options
from knn_moe.memory.card import describe_head

if TYPE_CHECKING:
    from knn_moe.adapt.calibrate.judge import Judgement
    from knn_moe.adapt.calibrate.language_head import HeadChoice
    from knn_moe.adapt.calibrate.result import Calibration, TokenChoice, TrialSummary
    from knn_moe.config import CalibrationConfig
    from knn_moe.support.statistics import Comparison


@click.command(name="calibrate")
@click.argument("model")
@click.argument("memory", type=PATH)
@click.argument("reference", type=PATH, required=False)
@click.option(
    "-k",
    "--neighbours",
    type=int,
    multiple=True,
    help="Try this number of neighbours (K). Can be repeated. Default: 8 and 32.",
)
@click.option(
    "--value-rate",
    type=float,
    multiple=True,
    help="Try this learning rate to train the stored values, relative to the spread of a layer's "
    "logits. Can be repeated. Default: 0.003, 0.01, 0.03, 0.1, 0.3 and 1.",
)
@click.option(
    "--keep-values", is_flag=True, help="Do not train the stored values; choose only their use."
)
@click.option(
    "--head",
    is_flag=True,
    help="Also predict the next token from what followed the nearest cases, as kNN-LM does: with "
    "routing or without, whichever is better.",
)
@click.option("-o", "--output", type=PATH, help="Write the calibrated memory to this folder.")
@overwrite_option
@click.option("--in-place", is_flag=True, help="Write the calibration into MEMORY itself.")
@click.option("--dry-run", is_flag=True, help="Show what would be chosen, and write nothing.")
@force_option
@reference_options
@model_options
@json_option
def command(
    model: str, memory: Path, reference: Path | None, as_json: bool, **options: Any
) -> None:
    """Choose how MEMORY is used on MODEL, and write a memory that is used like that.

    \b
    knn-moe calibrate tiny-olmoe memory -o calibrated
    knn-moe calibrate tiny-olmoe memory more.jsonl -o calibrated
    knn-moe calibrate tiny-olmoe memory --in-place
    knn-moe calibrate tiny-olmoe memory --dry-run --json

    Calibration reads the reference set that MEMORY was built from, or REFERENCE, which is anything
    that knn-moe build reads. It fits the widths (γ), the confidence (λ) and the stored values of
    each layer on one part of the examples, chooses the learning rate and the number of neighbours
    (K) on a second part, and judges the result on a third. No example recalls itself. If the memory
    does not help on held-out examples, calibration turns it off.
    """
    from knn_moe.adapt.calibrate.calibrate import calibrate
    from knn_moe.adapt.calibrate.result import write_calibrated
    from knn_moe.memory.memory import RoutingMemory

    config, target = _calibration_config(options), _choose_target(memory, options)
    if reference is None and any(options[name] for name in OPTIONS):
        raise click.UsageError("--column, --split and --format need a REFERENCE to be read.")
    examples = None if reference is None else open_reference(reference, options)
    opened = RoutingMemory.from_pretrained(str(memory))  # a Path would be no hub id
    network, tokenizer = load_model(model, options["device"], options["dtype"])
    with show_progress("Calibrating") as report:
        calibration = calibrate(
            network,
            opened,
            examples,
            config,
            tokenizer=tokenizer,
            force=options["force"],
            on_progress=report,
        )
    if target is not None:
        how = {name: options[name] for name in ("in_place", "overwrite")}
        write_calibrated(calibration.apply(opened), target, **how)
    if as_json:
        folder = None if target is None else str(target)
        chosen = {"folder": folder, "routing": calibration.routing.to_dict()}
        print_json({**chosen, **calibration.report()})
    else:
        show_calibration(calibration)
        wrote = "Nothing was written." if target is None else f"Wrote the memory to {target}."
        print_note(wrote)


def _choose_target(memory: Path, options: Mapping[str, Any]) -> Path | None:
    """Return the folder to write to, or None to write nothing.

    Raises:
        UsageError: The options name no place to write to, or more than one.
        MemoryFormatError: The folder is occupied.
    """
    from knn_moe.memory.files import refuse_existing

    output = options["output"]
    ways = {"-o": output is not None}
    ways |= {f"--{name}": options[name.replace("-", "_")] for name in ("in-place", "dry-run")}
    given = [name for name, is_given in ways.items() if is_given]
    if not given:
        raise click.UsageError(
            "Say where the calibrated memory goes: -o FOLDER writes a new memory, and --in-place "
            f"changes {str(memory)!r}. With --dry-run nothing is written."
        )
    if len(given) > 1:
        raise click.UsageError(
            f"{' and '.join(given)} contradict each other. Give -o FOLDER to write a new memory, "
            f"--in-place to change {str(memory)!r}, or --dry-run to write nothing."
        )
    if options["in_place"] and not memory.is_dir():
        raise click.UsageError(
            f"There is no folder {str(memory)!r} to write a calibration into. Give the folder of a "
            f"memory, or -o FOLDER to write a new one."
        )
    if output is not None:
        refuse_existing(output, overwrite=options["overwrite"])
    return memory if options["in_place"] else output


def _calibration_config(options: Mapping[str, Any]) -> CalibrationConfig:
    from knn_moe.config import CalibrationConfig

    rates = options["value_rate"]
    if options["keep_values"] and rates:
        raise click.UsageError(
            f"--keep-values and --value-rate {rates[0]} contradict each other. Leave one out."
        )
    given = pick_given(options, "neighbours", "head")
    if rates or options["keep_values"]:
        given["value_rates"] = rates
    return CalibrationConfig(**given)


def show_calibration(found: Calibration) -> None:
    """Print what was tried, what was chosen for each layer, and the result on held-out examples."""
    if found.token_choices:
        _show_choices(found.token_choices)
    show_trials(found.trials, found.chosen)
    _show_layers(found)
    show_judgement(found.judgement)
    if found.head:
        _show_head(found.head)
    show_time(found.seconds_by_part)
    if found.head and found.head.helps and found.head.config.alone:
        print_note("The memory does not route: its head is better alone.")
    elif not found.helps:
        print_note("The memory does not help on held-out examples, so calibration turned it off.")


def show_trials(trials: Sequence[TrialSummary], chosen: str) -> None:
    """Print the loss of every variant on the examples to choose by."""
    rows = [
        (
            f"{trial.name} *" if trial.name == chosen else trial.name,
            f"{trial.loss:.4f}",
            f"{trial.change:+.4f}",
            f"{trial.low:+.4f} to {trial.high:+.4f}",
        )
        for trial in trials
    ]
    columns = ("variant", "loss", "change", "95 % interval")
    print_table("Variants that were tried (* chosen)", columns, rows)


def show_judgement(judged: Judgement) -> None:
    """Print the result on the examples that had no part in anything before."""
    print_note(
        f"On {judged.examples} held-out examples ({judged.tokens:,} tokens), the loss goes from "
        f"{judged.alone:.4f} to {judged.loss:.4f} nats per token: {_in_words(judged.change)}."
    )
    if judged.looks > 1:
        print_note(
            "This was a second look, because fewer examples were not sure. Each example was judged "
            "by what was learned without it."
        )


def show_time(seconds_by_part: Mapping[str, float]) -> None:
    """Print what the time went to."""
    parts = [f"{part} ({seconds:.0f} s)" for part, seconds in seconds_by_part.items()]
    print_note(f"Time spent: {'; '.join(parts)}.")


def _show_layers(found: Calibration) -> None:
    mean_confidence = found.judgement.mean_confidence if found.helps else {}
    rows = []
    for layer, distance in found.distances.items():
        cells = [layer, *width_cells(found.routing.for_layer(layer))]
        cells += [f"{mean_confidence.get(layer, 0.0):.2f}", f"{found.update_scale[layer]:.3g}"]
        rows.append([*cells, f"{distance.nearest:.2f}", f"{distance.last:.2f}"])
    columns = ("layer", *WIDTH_COLUMNS, "mean λ", "update scale", "γ d² of nearest", "γ d² of last")
    print_table(f"Chosen for each layer, with K = {found.routing.k} neighbours", columns, rows)


def _show_choices(choices: Sequence[TokenChoice]) -> None:
    rows = [
        (f"{each.tokens}{' *' if each is choices[0] else ''}", each.loss_of, f"{each.loss:.4f}")
        for each in choices
    ]
    columns = ("tokens that become cases", "tokens whose loss is lowered", "loss of completions")
    print_table("Choices of tokens (* chosen)", columns, rows)


def _show_head(head: HeadChoice) -> None:
    config = head.config
    print_note(
        f"Language-model head ({config.k} cases, weight {config.weight:g}, "
        f"γ × {config.gamma_scale:g}), {describe_head(asdict(config))}: {_in_words(head.added)} "
        f"more, {head.change.difference:+.4f} in total."
    )
    if not head.helps:
        print_note("The head does not help on held-out examples, so it is left out.")


def _in_words(change: Comparison) -> str:
    return f"{change.difference:+.4f} (95 % interval {change.low:+.4f} to {change.high:+.4f})"
