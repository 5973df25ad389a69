"""`knn-moe routers`: list the routers that a memory would change."""

from __future__ import annotations

import click

from knn_moe.cli.common import json_option, print_json, print_table
from knn_moe.cli.program import rare_collections
from knn_moe.routers.load import load_structure


@click.command(name="routers")
@click.argument("model")
@json_option
def command(model: str, as_json: bool) -> None:
    """List the routers of MODEL that a memory would change.

    \b
    knn-moe routers tiny-olmoe
    knn-moe routers allenai/OLMoE-1B-7B-0125-Instruct --json

    MODEL is an embedded model (tiny-olmoe, tiny-qwen3 or tiny-gpt-oss), a folder, or a Hugging
    Face hub id. Only its configuration is read, not its weights.
    """
    with rare_collections():
        from knn_moe.routers.find import find_routers

        routers = find_routers(load_structure(model))
    fields = ("layer", "name", "num_experts", "top_k", "hidden_size")
    rows = [[getattr(router, field) for field in fields] for router in routers]
    if as_json:
        print_json([dict(zip(fields, row, strict=True)) for row in rows])
    else:
        title = f"{model} has {len(routers)} routers"
        print_table(title, ("layer", "router", "experts", "top-k", "hidden size"), rows)
