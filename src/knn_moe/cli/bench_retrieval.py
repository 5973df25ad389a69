"""`knn-moe bench retrieval`: what recall costs, for one layer or for a running model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from knn_moe.cli.bench_common import count_option, dtype_option, pick_dtype, show_stage
from knn_moe.cli.common import device_option, json_option, print_json, print_note, print_table
from knn_moe.routers.load import pick_device

if TYPE_CHECKING:
    from knn_moe.bench.search import SearchBench, SearchMeasure
    from knn_moe.bench.steps import StepBench, StepMeasure
    from knn_moe.index import IndexConfig

_LAYER_INDEXES: Final = (
    "exact", "faiss-flat", "ivfpq", "ivfpq,rerank", "fast", "fast,dims=64,rerank",
)  # fmt: skip
_LAYER_ONLY: Final = ("width", "grow")  # options without effect if --shape is given
# And if it is not.
_MODEL_ONLY: Final = ("layers", "prefill", "no_compile", "prototypes", "memories")


@click.command()
@click.option("--shape", help="Measure a running model of this shape, such as olmoe-1b-7b.")
@click.option("--layers", type=int, help="Make only this many layers (with --shape).")
@count_option("--keys", help="Keys in a layer. Default: 100,000, or 200,000 with --shape.")
@count_option("-k", default=32, help="Neighbours to recall.")
@count_option(
    "--prototypes",
    default=(1024,),
    multiple=True,
    help="Measure a memory that was distilled to this many (with --shape). May be repeated.",
)
@count_option(
    "--memories",
    least=2,
    multiple=True,
    help="Also measure this many distilled memories, another one for each row of a batch (with "
    "--shape). May be repeated.",
)
@click.option(
    "--index",
    "specs",
    multiple=True,
    metavar="SPEC",
    help="Measure only this index, such as fast,dims=128,value_bits=4 or ivfpq,rerank. May be "
    "repeated.",
)
@count_option(
    "--batch",
    "batches",
    default=(1, 64),
    multiple=True,
    help="Batch size: queries, or sequences with --shape. May be repeated.",
)
@count_option("--prefill", default=8192, help="Tokens to prefill (with --shape).")
@click.option("--no-compile", is_flag=True, help="Do not measure compiled steps (with --shape).")
@count_option("--width", default=512, help="Width of a key (without --shape).")
@count_option(
    "--grow",
    multiple=True,
    help="Also measure this many keys (without --shape). May be repeated.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw a plot to this .svg or .png file.",
)
@dtype_option
@device_option
@json_option
def retrieval(shape: str | None, plot: Path | None, as_json: bool, **options: Any) -> None:
    """Measure what recall costs with each index, for one layer or for a running model.

    \b
    knn-moe bench retrieval
    knn-moe bench retrieval --grow 25000 --grow 400000 --plot growth.svg
    knn-moe bench retrieval --index fast --index fast,dims=128,value_bits=4
    knn-moe bench retrieval --shape olmoe-1b-7b
    knn-moe bench retrieval --shape small --layers 2 --keys 5000 --no-compile

    One layer is compared with the exact search, and with the shortest time in which this machine
    could read and multiply what the index must. A running model is compared with itself without a
    memory: with a distilled memory, and with the fast index as calibration uses it, without and
    with a head, the exact search, and the fast index with one neighbour. The model has a published
    shape and random weights, so only speed and memory are measured.
    """
    from knn_moe.bench.plot import check_plot, plot_search, plot_steps
    from knn_moe.bench.search import measure_search
    from knn_moe.bench.steps import measure_steps

    _refuse_unused_options(shape)
    if plot is not None:
        check_plot(plot)
    bench: Any = _search_bench(**options) if shape is None else _step_bench(shape, **options)
    layer: tuple[Any, ...] = (measure_search, _show_search, plot_search)
    measure, show, draw = layer if shape is None else (measure_steps, _show_steps, plot_steps)
    rows: list[Any] = []
    try:
        with show_stage() as on_progress:
            for row in measure(bench, on_progress):
                rows.append(row)
    finally:  # an error or Ctrl-C does not lose what was measured
        if rows:
            if as_json:
                _print_retrieval(bench, rows)
            else:
                show(bench, rows)
            if plot is not None:
                draw(rows, plot)


def _refuse_unused_options(shape: str | None) -> None:
    """Refuse options that would have no effect."""
    from click.core import ParameterSource

    source = click.get_current_context().get_parameter_source
    unused, way = (_MODEL_ONLY, "with") if shape is None else (_LAYER_ONLY, "without")
    for name in unused:
        if source(name) is not ParameterSource.DEFAULT:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} has an effect only {way} --shape.")


def _search_bench(
    *, keys: int | None, specs: tuple[str, ...], grow: tuple[int, ...], **options: Any
) -> SearchBench:
    from knn_moe.bench.search import SearchBench

    return SearchBench(
        width=options["width"],
        sizes=tuple(sorted({keys or 100_000, *grow})),
        indexes=_indexes(specs, _LAYER_INDEXES),
        **_common(**options),
    )


def _step_bench(
    shape: str,
    *,
    keys: int | None,
    specs: tuple[str, ...],
    no_compile: bool,
    prototypes: tuple[int, ...],
    memories: tuple[int, ...],
    **options: Any,
) -> StepBench:
    from knn_moe.bench.steps import StepBench
    from knn_moe.bench.uses import chosen_uses, recommended_uses

    common = _common(**options)
    k = common.pop("k")
    uses = (
        chosen_uses(k, _indexes(specs, ())) if specs else recommended_uses(k, prototypes, memories)
    )
    compiled = not no_compile and common["device"].type == "cuda"
    bench = StepBench(
        shape=shape,
        layers=options["layers"],
        keys=keys or 200_000,
        prefill=options["prefill"],
        compiled=compiled,
        uses=uses,
        **common,
    )
    if not compiled and not no_compile:
        print_note("Compiled steps are left out: they run as CUDA graphs, which need a GPU.")
    return bench


def _common(
    *, k: int, batches: tuple[int, ...], dtype: str | None, device: str | None, **_: Any
) -> dict[str, Any]:
    place = pick_device(device)
    kept = tuple(dict.fromkeys(batches))
    return {"k": k, "batches": kept, "device": place, "dtype": pick_dtype(dtype, place)}


def _indexes(specs: tuple[str, ...], usual: tuple[str, ...]) -> tuple[IndexConfig, ...]:
    """Return the indexes of `specs`, or those of `usual` whose dependencies are installed.

    Raises:
        MissingDependencyError: One of `specs` needs a library that is not installed.
    """
    from knn_moe.bench.search import describe_index, missing_dependency, parse_index
    from knn_moe.errors import MissingDependencyError

    indexes = tuple(dict.fromkeys(parse_index(spec) for spec in specs or usual))
    kinds = dict.fromkeys(index.kind for index in indexes)
    reasons = {kind: why for kind in kinds if (why := missing_dependency(kind)) is not None}
    if not reasons:
        return indexes
    reason = next(iter(reasons.values()))
    if specs:
        raise MissingDependencyError(reason)
    names = [describe_index(index) for index in indexes if index.kind in reasons]
    print_note(f"Left out: {'; '.join(names)}. {reason}")
    return tuple(index for index in indexes if index.kind not in reasons)


def _show_search(bench: SearchBench, rows: list[SearchMeasure]) -> None:
    from knn_moe.bench.floor import machine_name

    title = (
        f"one layer, {bench.width} wide, {str(bench.dtype).removeprefix('torch.')}, "
        f"K = {bench.k}, on {machine_name(bench.device)}"
    )
    columns = (
        "index", "keys", "batch", "µs", "×\nexact", "recall\n@1", "bytes\na key", "build\ns",
        "floor\nµs", "×\nfloor", "bound\nby",
    )  # fmt: skip
    cells = [
        (
            row.index,
            f"{row.keys:,}",
            row.batch,
            _short(row.microseconds),
            _short(row.times_exact),
            f"{row.recall:.3f}",
            f"{row.bytes_per_key:,.0f}",
            f"{row.build_seconds:.1f}",
            _short(row.floor_microseconds),
            _short(row.times_floor),
            row.bound,
        )
        for row in rows
    ]
    print_table(title, columns, cells, names=3)
    rates = rows[0].rates
    click.echo(
        f"× exact: how many times faster than the exact search. Floor: reading the fewest bytes at "
        f"{rates.bytes_per_second / 1e9:,.1f} GB/s (a large copy), or the sums at "
        f"{rates.operations_per_second / 1e12:,.3g} TFLOP/s (a large product). × floor: how many "
        f"times slower than that."
    )


def _short(number: float) -> str:
    """Return a number with at least three digits."""
    return f"{number:,.{2 if number < 10 else 1 if number < 100 else 0}f}"


def _show_steps(bench: StepBench, rows: list[StepMeasure]) -> None:
    from knn_moe.bench.floor import machine_name
    from knn_moe.bench.steps import ALONE

    title = (
        f"{bench.shape}, {bench.depth} layers, {bench.keys:,} keys a layer, "
        f"{str(bench.dtype).removeprefix('torch.')}, on {machine_name(bench.device)}"
    )
    steps = list(dict.fromkeys(row.what for row in rows))
    cells = [
        (
            row.what,
            row.memory,
            f"{row.milliseconds:,.2f}",
            _over(None if row.memory == ALONE else row.times_alone),
            "-" if row.gigabytes is None else f"{row.gigabytes:,.2f}",
            _over(None if row.memory == ALONE else row.memory_times_alone),
        )
        for row in sorted(rows, key=lambda row: steps.index(row.what))
    ]
    columns = ("step", "memory", "ms", "over the model alone", "GB", "over")
    print_table(title, columns, cells)


def _over(ratio: float | None) -> str:
    """Return what a ratio adds, in percent."""
    return "-" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


def _print_retrieval(bench: Any, rows: list[Any]) -> None:
    from dataclasses import asdict

    from knn_moe.bench.floor import machine_name
    from knn_moe.bench.search import SearchBench, describe_index
    from knn_moe.memory.manifest import library_versions

    settings = asdict(bench) | {"device": str(bench.device), "dtype": str(bench.dtype)}
    if isinstance(bench, SearchBench):
        settings["indexes"] = [describe_index(index) for index in bench.indexes]
    else:
        settings["uses"] = {use.name: use.to_dict() for use in bench.uses}
    print_json(
        {
            "machine": machine_name(bench.device),
            "versions": library_versions(),
            "settings": settings,
            "rows": [row.to_dict() for row in rows],
        }
    )
