"""`knn-moe calibrate`: how a memory is best used, found on its own reference set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from knn_moe.cli.common import (
    device_option,
    dtype_option,
    json_option,
    load_model,
    log,
    print_json,
    print_table,
    progress_bar,
)
from knn_moe.cli.inspect import KERNEL_COLUMNS, kernel_cells
from knn_moe.errors import ConfigError, MemoryFormatError

_SHOWN: Final = 3  # of the ways to find better logits

if TYPE_CHECKING:
    from knn_moe.adapt.calibrate.config import CalibrationConfig
    from knn_moe.adapt.calibrate.language_head import HeadFound
    from knn_moe.adapt.calibrate.result import Calibration, Candidate


@click.command(name="calibrate")
@click.argument("model")
@click.argument("memory", type=click.Path(path_type=Path))
@click.argument("reference", type=click.Path(path_type=Path), required=False)
@click.option("-k", "--neighbours", type=int, multiple=True, help="K to choose among; repeatable.")
@click.option("--value-rate", type=float, multiple=True, help="To learn values at; repeatable.")
@click.option("--keep-values", is_flag=True, help="Fit how cases are used, not what they say.")
@click.option("--head", is_flag=True, help="Also tell the next token, by what followed the cases.")
@click.option("--dry-run", is_flag=True, help="Only say what would be chosen.")
@click.option("--force", is_flag=True, help="Calibrate a memory that was built for another model.")
@device_option
@dtype_option
@json_option
def command(
    model: str,
    memory: Path,
    reference: Path | None,
    neighbours: tuple[int, ...],
    value_rate: tuple[float, ...],
    keep_values: bool,
    head: bool,
    dry_run: bool,
    force: bool,
    device: str | None,
    dtype: str,
    as_json: bool,
) -> None:
    """Find out how MEMORY is best used on MODEL, and write that into it.

    \b
    knn-moe calibrate ./my-model memory
    knn-moe calibrate ./my-model memory more.jsonl
    knn-moe calibrate ./my-model memory --dry-run --json

    Reads the reference set MEMORY was built from, or REFERENCE, a file like it: some examples to
    fit each layer's kernels and the cases' values on, others to choose by, and others again to
    judge the result by. An example recalls others only, never itself. A memory that does not help
    there, beyond chance, is told to keep silent. With --head the memory also tells the next token,
    as kNN-LM does, where that helps beyond the routing.
    """
    from knn_moe.adapt.calibrate.calibrate import calibrate
    from knn_moe.adapt.calibrate.result import write_calibrated
    from knn_moe.memory.memory import RoutingMemory
    from knn_moe.reference.examples import iter_examples

    config = _settings(neighbours, value_rate, keep_values=keep_values, head=head)
    examples = None if reference is None else list(iter_examples(reference))
    _require_folder(memory, dry_run=dry_run)
    opened = RoutingMemory.from_pretrained(memory)
    network, tokenizer = load_model(model, device, dtype)
    with progress_bar("Calibrating") as update:
        found = calibrate(
            network,
            opened,
            examples,
            config,
            tokenizer=tokenizer,
            force=force,
            on_progress=lambda what, done, total: update(done, total, what),
        )
    if not dry_run:
        write_calibrated(found.apply(opened), memory)
    _show(found, None if dry_run else memory, as_json=as_json)


def _show(found: Calibration, folder: Path | None, *, as_json: bool) -> None:
    if as_json:
        print_json({"routing": found.routing.to_dict(), **found.report()})
    else:
        show_calibration(found)
        log.print("Nothing was written." if folder is None else f"Written into {folder}.")


def _settings(
    neighbours: tuple[int, ...], value_rate: tuple[float, ...], *, keep_values: bool, head: bool
) -> CalibrationConfig:
    from knn_moe.adapt.calibrate.config import CalibrationConfig

    if keep_values and value_rate:
        raise ConfigError(
            f"--keep-values and --value-rate {value_rate[0]} do not go together: leave one out."
        )
    asked: dict[str, Any] = {"neighbours": neighbours, "value_rates": value_rate}
    given = {name: choices for name, choices in asked.items() if choices}
    return CalibrationConfig(head=head, **given | ({"value_rates": ()} if keep_values else {}))


def _require_folder(memory: Path, *, dry_run: bool) -> None:
    """Told before the work: its result would have nowhere to go."""
    if not dry_run and not memory.is_dir():
        raise MemoryFormatError(
            f"There is no folder {str(memory)!r} to write a calibration into: calibrate a memory "
            f"on disk, or only look, with --dry-run."
        )


def show_calibration(found: Calibration) -> None:
    """What was tried, what was chosen for each layer, and what it is worth."""
    if found.targets:
        _show_targets(found.targets)
    tried = [
        (
            f"{trial.name} *" if trial.name == found.chosen else trial.name,
            f"{trial.loss:.4f}",
            f"{trial.change:+.4f}",
            f"{trial.low:+.4f} to {trial.high:+.4f}",
        )
        for trial in found.trials
    ]
    print_table("Tried, and chosen (*)", ("way", "loss", "change", "95 %"), tried)
    mean = found.judgement.mean_confidence if found.helps else {}
    rows = [
        (
            kernel.layer,
            *kernel_cells(kernel),
            f"{mean.get(kernel.layer, 0.0):.2f}",
            f"{found.update_scale[kernel.layer]:.3g}",
            f"{far.nearest:.2f}",
            f"{far.last:.2f}",
        )
        for kernel in map(found.routing.for_layer, found.distances)
        for far in [found.distances[kernel.layer]]
    ]
    columns = ("layer", *KERNEL_COLUMNS, "mean λ", "stretch ×", "γ d² nearest", "last")
    print_table(f"K = {found.routing.k}", columns, rows)
    judged, change = found.judgement, found.judgement.change
    log.print(
        f"On {judged.examples} other examples ({judged.tokens:,} tokens): {judged.alone:.4f} → "
        f"{judged.loss:.4f} nats a token, {change.difference:+.4f} "
        f"({change.low:+.4f} to {change.high:+.4f})."
    )
    if found.head:
        _show_head(found.head)
    parts = ", ".join(f"{what} {seconds:.0f}" for what, seconds in found.seconds_by_part.items())
    log.print(f"Seconds: {parts}.")
    if not found.helps:
        log.print(
            "No better than the model alone, beyond chance: the memory will keep silent, and have "
            "no head."
        )


def _show_targets(targets: Sequence[Candidate]) -> None:
    ways = [
        (
            f"{way.learning_rate:g}{' *' if way is targets[0] else ''}",
            way.steps,
            way.gradient,
            f"{way.loss:.4f}",
        )
        for way in targets[:_SHOWN]
    ]
    print_table("Ways to better logits (* taken)", ("η", "S", "gradient", "loss"), ways)


def _show_head(head: HeadFound) -> None:
    config, change, added = head.config, head.change, head.added
    log.print(
        f"Head: {config.k} cases, weight {config.weight:g}, γ × {config.gamma_scale:g}: "
        f"{added.difference:+.4f} more ({added.low:+.4f} to {added.high:+.4f}), "
        f"{change.difference:+.4f} in all{'' if head.helps else ': left out, no better'}."
    )
