"""`knn-moe explain`: what a memory recalled for each token of a text, and what it did."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from knn_moe.cli.common import (
    device_option,
    dtype_option,
    json_option,
    load_model,
    log,
    pad_token,
    print_json,
    read_prompt,
)
from knn_moe.errors import ConfigError

if TYPE_CHECKING:
    from knn_moe.explain.explanation import Explanation
    from knn_moe.inference.attach import Routing


@click.command(name="explain")
@click.argument("model")
@click.argument("prompt")
@click.option("--memory", required=True, help="Folder or hub id of a memory.")
@click.option("--layer", "layers", type=int, multiple=True, help="Show this layer in detail.")
@click.option("--tokens", type=click.IntRange(min=1), help="Only so many tokens, from the end.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Go on from the prompt, and explain that too.",
)
@click.option("-k", "neighbours", type=int, help="Neighbours recalled. Default: the memory's own.")
@click.option("--chat", is_flag=True, help="Put the prompt through the model's chat template.")
@click.option("--force", is_flag=True, help="Use a memory that was built for another model.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write a page to read in a browser, without network.",
)
@device_option
@dtype_option
@json_option
def command(
    model: str,
    prompt: str,
    memory: str,
    layers: tuple[int, ...],
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show what MODEL recalls for each token of PROMPT, and what that does to its routers.

    \b
    knn-moe explain ./my-model "A fever is" --memory memory
    knn-moe explain ./my-model "A fever is" --memory memory --layer 3 --max-new-tokens 20
    knn-moe explain ./my-model "A fever is" --memory memory -o explanation.html

    A line a token: mean λ, in how many layers the experts changed, and the case recalled most
    surely: [its token] and what followed there. Of a layer: distance (1 is usual), λ, and the
    experts that came in and went out, with what was added to their logits.
    """
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(f"There is no folder {str(output.parent)!r} to write {output.name!r} to.")
    explanation = _explained(model, prompt, memory, **options)
    chosen = explanation.only(layers) if layers else explanation
    if output is not None:
        from knn_moe.report.explanation import render_explanation
        from knn_moe.report.page import write_page

        write_page(render_explanation(chosen, model, memory), output)
        log.print(f"Written to {output}", markup=False)
    if as_json:
        print_json(chosen.to_dict())
    elif not explanation.layers:
        click.echo("No layer has a memory attached: the memory is silent.")
    else:
        width = max(shutil.get_terminal_size((100, 24)).columns, 60)
        tables = [f"layer {layer}\n{chosen.table(layer, width)}" for layer in chosen.layers]
        click.echo("\n\n".join(tables) if layers else chosen.table(width=width))


def _explained(
    model: str,
    prompt: str,
    memory: str,
    *,
    neighbours: int | None,
    chat: bool,
    force: bool,
    device: str | None,
    dtype: str,
    **reading: Any,
) -> Explanation:
    from dataclasses import replace

    from knn_moe.inference.attach import attach
    from knn_moe.memory.memory import RoutingMemory

    opened = RoutingMemory.from_pretrained(memory)
    config = opened.routing if neighbours is None else replace(opened.routing, k=neighbours)
    network, tokenizer = load_model(model, device, dtype)
    inputs = read_prompt(tokenizer, prompt, chat, network.device)
    with attach(network, opened, config, force=force) as routing:
        return _read(routing, network, tokenizer, inputs, **reading)


def _read(
    routing: Routing,
    network: Any,
    tokenizer: Any,
    inputs: dict[str, Any],
    *,
    max_new_tokens: int,
    tokens: int | None,
) -> Explanation:
    """Explain the prompt, and what the model makes of it where that is asked for."""
    ids = inputs["input_ids"]
    if max_new_tokens:
        settings = {"do_sample": False, "max_new_tokens": max_new_tokens}
        ids = network.generate(**inputs, **settings, pad_token_id=pad_token(tokenizer))
    return routing.explain(ids, tokenizer=tokenizer, last=tokens)
