"""`knn-moe routers`: which routers a memory would touch."""

from __future__ import annotations

import click

from knn_moe.cli.common import json_option, load_structure, print_json, print_table


@click.command(name="routers")
@click.argument("model")
@json_option
def command(model: str, as_json: bool) -> None:
    """Show which routers of MODEL (a folder or a hub id) a memory would touch.

    \b
    knn-moe routers allenai/OLMoE-1B-7B-0125-Instruct
    knn-moe routers ./my-model --json

    Only the config is read; no weights are loaded.
    """
    from knn_moe.routers.find import find_routers

    found = find_routers(load_structure(model))
    fields = ("layer", "name", "num_experts", "top_k", "hidden_size")
    rows = [[getattr(router, field) for field in fields] for router in found]
    if as_json:
        print_json([dict(zip(fields, row, strict=True)) for row in rows])
    else:
        title = f"{model}: {len(found)} routers"
        print_table(title, ("layer", "router", "experts", "top-k", "hidden"), rows)
