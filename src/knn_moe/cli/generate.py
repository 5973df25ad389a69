"""`knn-moe generate`: generate text with and without a memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import click

from knn_moe.cli.common import (
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
    print_table,
    print_text,
)


@click.command(name="generate")
@click.argument("model")
@click.argument("prompt")
@click.option("--memory", help="Use this memory: a folder or a hub id. Default: none.")
@click.option(
    "--max-new-tokens",
    type=POSITIVE,
    default=64,
    show_default=True,
    help="Generate at most this many tokens.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Sample at this temperature. 0 always takes the most likely token.",
)
@click.option("--seed", default=0, show_default=True, help="Seed for sampling and for --control.")
@neighbours_option
@click.option(
    "--control",
    help="Break one part of the memory on purpose: shuffled (values), random (neighbours) or "
    "own-logits (no optimisation).",
)
@click.option("--compare", is_flag=True, help="Also generate without the memory.")
@chat_option
@force_option
@model_options
@json_option
def command(model: str, prompt: str, as_json: bool, **options: Any) -> None:
    """Generate text from PROMPT with MODEL and a memory.

    \b
    knn-moe generate tiny-olmoe "A fever is" --memory memory
    knn-moe generate tiny-olmoe "A fever is" --memory memory --compare --json
    knn-moe generate tiny-olmoe "A fever is" --memory memory --control shuffled

    After the text, a table shows for each layer the mean confidence (λ) and the share of tokens
    whose experts the memory changed.
    """
    from knn_moe.memory.memory import RoutingMemory

    _check_combination(options)
    memory = None
    if options["memory"] is not None:
        memory = RoutingMemory.from_pretrained(options["memory"])
    network, tokenizer = load_model(model, options["device"], options["dtype"])
    answer: dict[str, Any] = {"prompt": prompt}
    if memory is None:
        answer["text"] = _generate(network, tokenizer, prompt, options)
    else:
        if options["compare"]:
            answer["without_memory"] = _generate(network, tokenizer, prompt, options)
        answer |= _generate_with(memory, network, tokenizer, prompt, options)
    if as_json:
        print_json(answer)
    else:
        _show(answer)


def _check_combination(options: Mapping[str, Any]) -> None:
    """Refuse what cannot be done before anything is loaded."""
    from knn_moe.adapt.controls import CONTROLS

    if options["compare"] and options["memory"] is None:
        raise click.UsageError("--compare needs a --memory to compare with.")
    if options["control"] is not None:
        CONTROLS.find(options["control"])
        if options["memory"] is None:
            raise click.UsageError("--control needs a --memory to change.")


def _generate_with(
    memory: Any, network: Any, tokenizer: Any, prompt: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the text with the memory attached, and what the memory did in each layer."""
    from knn_moe.adapt.controls import control
    from knn_moe.inference.attach import attach

    force, neighbours = options["force"], options["neighbours"]
    if options["control"] is not None:
        memory = control(memory, options["control"], network, seed=options["seed"], force=force)
    config = memory.routing if neighbours is None else replace(memory.routing, k=neighbours)
    with attach(network, memory, config, force=force) as routing:
        text = _generate(network, tokenizer, prompt, options)
        layers = {index: asdict(layer) for index, layer in routing.stats().items()}
    return {"text": text, "layers": layers}


def _generate(network: Any, tokenizer: Any, prompt: str, options: Mapping[str, Any]) -> str:
    import torch

    inputs = encode_prompt(tokenizer, prompt, options["chat"], network.device)
    torch.manual_seed(options["seed"])
    sampling: dict[str, Any] = {"do_sample": False}
    if options["temperature"]:
        sampling = {"do_sample": True, "temperature": options["temperature"]}
    output = network.generate(
        **inputs,
        **sampling,
        max_new_tokens=options["max_new_tokens"],
        pad_token_id=pad_token(tokenizer),
    )
    new = output[0, inputs["input_ids"].shape[1] :]
    text: str = tokenizer.decode(new, skip_special_tokens=True)
    return text


def _show(answer: dict[str, Any]) -> None:
    if "without_memory" in answer:
        print_text(
            f"without memory: {answer['without_memory']}\n\nwith memory:    {answer['text']}"
        )
    else:
        print_text(answer["text"])
    if "layers" in answer:
        rows = [
            (
                index,
                layer["tokens"],
                f"{layer['mean_confidence']:.3f}",
                "-" if layer["changed"] is None else f"{layer['changed']:.1%}",
            )
            for index, layer in answer["layers"].items()
        ]
        columns = ("layer", "tokens", "mean λ", "tokens with changed experts")
        click.echo()
        print_table("What the memory did", columns, rows)
