"""`knn-moe bench serve`: a server under load, with and without memories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from knn_moe.cli.bench_common import count_option, show_stage
from knn_moe.cli.common import json_option, print_json, print_table

if TYPE_CHECKING:
    from knn_moe.bench.serve_speed import ServeBench, ServeMeasure

_KINDS: Final = ("full", "distilled")


@click.command()
@click.argument("model", required=False)
@click.option(
    "--shape",
    help="Make a model of this shape with random weights instead. Default: olmoe-80m.",
)
@count_option("--clients", default=64, help="Clients, each with one request at a time.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="Let clients ask for this time, in each case.",
)
@count_option("--rounds", default=2, help="Rounds in which the cases take turns.")
@count_option("--prompt", default=32, help="Tokens of a prompt.")
@count_option("--tokens", default=64, help="Tokens of an answer.")
@count_option("--at-once", default=32, help="Answers that a server generates at the same time.")
@count_option("--memories", default=8, help="Memories of the servers that have several.")
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(_KINDS),
    multiple=True,
    default=_KINDS,
    show_default=True,
    help="Measure memories of this kind only. May be repeated.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="CASE",
    help="Measure this case only, such as '8 distilled'. May be repeated; ratios are to the first.",
)
@count_option("--keys", default=20_000, help="Cases of a full memory in each layer.")
@count_option("-k", default=1, help="Neighbours that full memories recall.")
@count_option("--prototypes", default=1024, help="Prototypes of a distilled memory in each layer.")
@json_option
def serve(
    model: str | None,
    kinds: tuple[str, ...],
    memories: int,
    only: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Measure `knn-moe serve` under load: the model alone, one memory, and several.

    \b
    knn-moe bench serve
    knn-moe bench serve tiny-olmoe --seconds 30
    knn-moe bench serve --kind distilled --clients 16 --json
    knn-moe bench serve --only '8 distilled' --seconds 3600 --rounds 1

    Each case has a server of its own on a free port of this machine. Clients send prompts of random
    tokens and read the streams; each request names another memory. The memories hold what the
    model's routers see on random tokens, and prototypes are not trained, so only speed is measured,
    not quality. On a CPU the clients take a part of it.
    """
    from knn_moe.bench.clients import Load
    from knn_moe.bench.serve_speed import Case, ServeBench, measure_serving

    if model is not None and options["shape"] is not None:
        raise click.UsageError("Give a MODEL or a --shape, not both.")
    counts = dict.fromkeys((1, memories))
    cases = [
        Case("base"),
        *(Case(kind, count) for kind in _KINDS if kind in kinds for count in counts),
    ]
    names = [case.name for case in cases]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise click.UsageError(f"There is no case {unknown[0]!r}. Available: {', '.join(names)}.")
    cases = [case for case in cases if not only or case.name in only]
    load = Load(**{name: options.pop(name) for name in ("clients", "prompt", "tokens")})
    shape = options.pop("shape") or "olmoe-80m"
    bench = ServeBench(model=model, shape=shape, cases=tuple(cases), load=load, **options)
    with show_stage() as on_progress:
        rows = measure_serving(bench, on_progress)
    if as_json:
        _print(bench, rows)
    else:
        _show(bench, rows)


def _print(bench: ServeBench, rows: list[ServeMeasure]) -> None:
    import torch

    from knn_moe.bench.floor import machine_name
    from knn_moe.bench.serve_speed import settings_of
    from knn_moe.memory.manifest import library_versions

    print_json(
        {
            "machine": machine_name(torch.device("cpu")),
            "versions": library_versions(),
            "settings": settings_of(bench),
            "rows": [row.to_dict() for row in rows],
        }
    )


def _show(bench: ServeBench, rows: list[ServeMeasure]) -> None:
    import torch

    from knn_moe.bench.floor import machine_name

    name = bench.model or f"{bench.shape} with random weights"
    title = (
        f"{name}, {bench.load.clients} clients for {bench.seconds:g} seconds, prompts of "
        f"{bench.load.prompt} tokens and answers of {bench.load.tokens}, on "
        f"{machine_name(torch.device('cpu'))}"
    )
    columns = (
        "memories", "tokens/s", "× base", "first token\np50 s", "\np95 s", "answer\np50 s",
        "\np95 s", "\np99 s", "answers", "errors", "RSS MB\nstart", "\nmiddle", "\nend",
    )  # fmt: skip
    print_table(title, columns, [_cells(row) for row in rows])
    for row in rows:
        for error in sorted(set(row.got.errors))[:3]:
            click.echo(f"{row.case}: {error}")


def _cells(row: ServeMeasure) -> tuple[str, ...]:
    held = row.megabytes
    shown = [held[0], held[len(held) // 2], held[-1]] if held else []
    return (
        row.case,
        f"{row.tokens_per_second:,.0f}",
        f"{row.times_base:.2f}",
        *(f"{row.first_token(share):.2f}" for share in (0.5, 0.95)),
        *(f"{row.latency(share):.2f}" for share in (0.5, 0.95, 0.99)),
        f"{len(row.got.answers):,}",
        f"{len(row.got.errors):,}",
        *(f"{one:,.0f}" for one in shown or ()),
        *("–" for _ in range(3 - len(shown))),
    )
