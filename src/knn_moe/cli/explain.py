"""`knn-moe explain`: show what a memory recalled for each token, and what changed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from knn_moe.cli.common import (
    FILE,
    POSITIVE,
    chat_option,
    encode_prompt,
    force_option,
    json_option,
    load_model,
    model_options,
    neighbours_option,
    pad_token,
    print_json,
    print_note,
    print_text,
)
from knn_moe.memory.card import describe_head
from knn_moe.support.files import check_place

if TYPE_CHECKING:
    from knn_moe.explain.explanation import Explanation


@click.command(name="explain")
@click.argument("model")
@click.argument("prompt")
@click.option("--memory", required=True, help="Use this memory: a folder or a hub id.")
@click.option(
    "--layer", "layers", type=int, multiple=True, help="Show this layer in detail. Can be repeated."
)
@click.option("--tokens", type=POSITIVE, help="Explain only this many tokens, from the end.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Generate this many tokens after the prompt and explain them too.",
)
@neighbours_option
@chat_option
@force_option
@click.option(
    "-o",
    "--output",
    type=FILE,
    help="Also write an HTML page to this file. The page needs no network.",
)
@model_options
@json_option
def command(model: str, prompt: str, output: Path | None, as_json: bool, **options: Any) -> None:
    """Show what MODEL recalls for each token of PROMPT, and how its routing changes.

    \b
    knn-moe explain tiny-olmoe "A fever is" --memory memory
    knn-moe explain tiny-olmoe "A fever is" --memory memory --layer 3 --max-new-tokens 20
    knn-moe explain tiny-olmoe "A fever is" --memory memory -o explanation.html

    Each token has one line: the mean confidence (λ), the number of layers in which the experts
    changed, the probability of the next token by the model alone → with the memory, and the nearest
    case of the layer with the highest confidence, as [its token] and the text that followed.
    With --layer a line shows the distance (1 is typical), λ, and the experts that were added and
    removed, each with the change of its logit. The page has all recalled cases.
    """
    if output is not None:
        check_place(output)
    explanation, layers = _explain(model, prompt, options), options["layers"]
    chosen = explanation.only(layers) if layers else explanation
    chosen = replace(chosen, model=model, memory=f"the memory {options['memory']}")
    if output is not None:
        chosen.save(output)
        print_note(f"Wrote {output} ({output.stat().st_size / 1e6:.1f} MB).")
    if as_json:
        print_json(chosen.to_dict())
    elif not explanation.layers:
        click.echo("The memory does not route: it is attached to no layer.")
    else:
        width = max(shutil.get_terminal_size((80, 24)).columns, 60)
        tables = [f"layer {layer}\n{chosen.table(layer, width)}" for layer in chosen.layers]
        print_text("\n\n".join(tables) if layers else chosen.table(width=width))


def _explain(model: str, prompt: str, options: Mapping[str, Any]) -> Explanation:
    """Explain the prompt and, if asked for, the tokens that the model generates after it."""
    from knn_moe.inference.attach import attach
    from knn_moe.inference.streaming import room_after
    from knn_moe.memory.memory import RoutingMemory

    memory = RoutingMemory.from_pretrained(options["memory"])
    config, neighbours = memory.routing, options["neighbours"]
    if config.head is not None:
        head = describe_head(asdict(config.head))
        print_note(f"Only routing is explained. The memory also predicts next tokens, {head}.")
    if neighbours is not None:
        config = replace(config, k=neighbours)
    network, tokenizer = load_model(model, options["device"], options["dtype"])
    inputs = encode_prompt(tokenizer, prompt, options["chat"], network.device)
    room = room_after(network, inputs["input_ids"].shape[-1])
    with attach(network, memory, config, force=options["force"]) as routing:
        ids = inputs["input_ids"]
        if options["max_new_tokens"]:
            ids = network.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=min(options["max_new_tokens"], room),
                pad_token_id=pad_token(tokenizer),
            )
        return routing.explain(ids, tokenizer=tokenizer, last=options["tokens"])
