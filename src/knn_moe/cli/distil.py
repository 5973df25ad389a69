"""`knn-moe distil`: learn a few prototypes that stand for all cases of a memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from knn_moe.cli.calibrate import show_judgement, show_time, show_trials
from knn_moe.cli.common import (
    PATH,
    force_option,
    json_option,
    load_model,
    model_options,
    output_option,
    overwrite_option,
    pick_given,
    print_json,
    print_note,
    show_progress,
)
from knn_moe.cli.inspect import show_layers
from knn_moe.cli.reference import OPTIONS, open_reference, reference_options

if TYPE_CHECKING:
    from knn_moe.adapt.distil.result import Distillation


@click.command(name="distil")
@click.argument("model")
@click.argument("memory", type=PATH)
@click.argument("reference", type=PATH, required=False)
@output_option
@click.option(
    "--prototypes",
    type=int,
    help="Learn this many prototypes (P) for each layer, but at most one to four cases. Default: "
    "1024.",
)
@click.option(
    "--rate",
    "rates",
    type=float,
    multiple=True,
    help="Try this learning rate, relative to the spread of a layer's logits. Can be repeated. "
    "Default: 0.03, 0.1 and 0.3.",
)
@click.option("--passes", type=int, help="Read the examples at most this often. Default: 4.")
@overwrite_option
@force_option
@reference_options
@model_options
@json_option
def command(
    model: str, memory: Path, reference: Path | None, output: Path, as_json: bool, **options: Any
) -> None:
    """Distil MEMORY to a few prototypes a layer, and write a memory of these.

    \b
    knn-moe distil tiny-olmoe memory -o small
    knn-moe distil tiny-olmoe memory -o small --prototypes 4096
    knn-moe distil tiny-olmoe memory more.jsonl -o small

    The prototypes of a layer are recalled all at once, so nothing is searched. They learn on the
    reference set that MEMORY was built from, or on REFERENCE, which is anything that knn-moe build
    reads: on one part of the examples. The learning rate and the number of passes are chosen on a
    second part, and a third part judges the result. A layer that does not help is turned off, and
    so is the whole memory if it does not help. Only the keys of MEMORY are used: it need not be
    calibrated.
    """
    from knn_moe.adapt.distil.distil import distil
    from knn_moe.config import DistilConfig
    from knn_moe.memory.files import refuse_existing
    from knn_moe.memory.memory import RoutingMemory

    refuse_existing(output, overwrite=options["overwrite"])
    if reference is None and any(options[name] for name in OPTIONS):
        raise click.UsageError("--column, --split and --format need a REFERENCE to be read.")
    config = DistilConfig(**pick_given(options, "prototypes", "passes", "rates"))
    examples = None if reference is None else open_reference(reference, options)
    opened = RoutingMemory.from_pretrained(str(memory))  # a Path would be no hub id
    network, tokenizer = load_model(model, options["device"], options["dtype"])
    with show_progress("Distilling") as report:
        found = distil(
            network,
            opened,
            examples,
            config,
            tokenizer=tokenizer,
            force=options["force"],
            on_progress=report,
        )
    small = found.apply(opened)
    small.save_pretrained(output, overwrite=options["overwrite"])
    if as_json:
        facts = {"folder": str(output), "bytes": small.nbytes}
        print_json({**facts, "routing": found.routing.to_dict(), **found.report()})
        return
    show_distillation(found)
    show_layers(small)
    print_note(
        f"{opened.nbytes / 1e6:,.1f} MB → {small.nbytes / 1e6:,.1f} MB "
        f"({opened.nbytes / small.nbytes:.1f} times smaller) in {output}"
    )


def show_distillation(found: Distillation) -> None:
    """Print what was tried, and the result on held-out examples."""
    show_trials(found.trials, found.chosen)
    show_judgement(found.judgement)
    show_time(found.seconds_by_part)
    if not found.helps:
        print_note("The prototypes do not help on held-out examples, so they are turned off.")
    elif found.off:
        layers = ", ".join(map(str, found.off))
        print_note(f"Turned off, because the loss is no higher without them: layers {layers}.")
