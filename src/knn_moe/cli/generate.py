"""`knn-moe generate`: text with and without a memory."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from knn_moe.cli.common import (
    device_option,
    dtype_option,
    json_option,
    load_model,
    pad_token,
    print_json,
    print_table,
    read_prompt,
)
from knn_moe.errors import ConfigError


@click.command(name="generate")
@click.argument("model")
@click.argument("prompt")
@click.option("--memory", help="Folder or hub id of a memory; without one, the bare model.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="0 takes the likeliest token.",
)
@click.option("--seed", default=0, show_default=True, help="For sampling.")
@click.option("-k", "neighbours", type=int, help="Neighbours recalled. Default: the memory's own.")
@click.option("--control", help="Take one thing from the memory: shuffled, random or own-logits.")
@click.option("--compare", is_flag=True, help="Also generate without the memory.")
@click.option("--chat", is_flag=True, help="Put the prompt through the model's chat template.")
@click.option("--force", is_flag=True, help="Use a memory that was built for another model.")
@device_option
@dtype_option
@json_option
def command(
    model: str,
    prompt: str,
    memory: str | None,
    neighbours: int | None,
    control: str | None,
    compare: bool,
    force: bool,
    device: str | None,
    dtype: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate from PROMPT with MODEL, leaning on a memory.

    \b
    knn-moe generate ./my-model "A fever is" --memory memory
    knn-moe generate ./my-model "A fever is" --memory memory --compare --json
    knn-moe generate ./my-model "A fever is" --memory memory --control shuffled
    """
    from dataclasses import replace

    from knn_moe.inference.attach import attach
    from knn_moe.memory.memory import RoutingMemory

    if compare and memory is None:
        raise ConfigError("--compare needs a --memory to compare with.")
    if control is not None:
        _check_control(control, memory)
    opened = RoutingMemory.from_pretrained(memory) if memory is not None else None
    network, tokenizer = load_model(model, device, dtype)
    answer: dict[str, Any] = {"prompt": prompt}
    if opened is None or compare:
        answer["text" if opened is None else "without_memory"] = _generate(
            network, tokenizer, prompt, **options
        )
    if opened is not None:
        if control is not None:
            opened = _controlled(opened, control, network, options["seed"], force=force)
        config = opened.routing if neighbours is None else replace(opened.routing, k=neighbours)
        with attach(network, opened, config, force=force) as routing:
            answer["text"] = _generate(network, tokenizer, prompt, **options)
            answer["layers"] = {index: asdict(layer) for index, layer in routing.stats().items()}
    if as_json:
        print_json(answer)
    else:
        _show(answer)


def _check_control(name: str, memory: str | None) -> None:
    """Told before the model loads."""
    from knn_moe.adapt.controls import control_named

    control_named(name)
    if memory is None:
        raise ConfigError("--control needs a --memory to take something from.")


def _controlled(memory: Any, name: str, network: Any, seed: int, *, force: bool) -> Any:
    from knn_moe.adapt.controls import control

    return control(memory, name, network, seed=seed, force=force)


def _generate(
    network: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    chat: bool,
) -> str:
    import torch

    inputs = read_prompt(tokenizer, prompt, chat, network.device)
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
    settings = {"do_sample": False, **sampling, "max_new_tokens": max_new_tokens}
    output = network.generate(**inputs, **settings, pad_token_id=pad_token(tokenizer))
    text: str = tokenizer.decode(
        output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return text


def _show(answer: dict[str, Any]) -> None:
    if "without_memory" in answer:
        click.echo(
            f"without memory: {answer['without_memory']}\n\nwith memory:    {answer['text']}"
        )
    else:
        click.echo(answer["text"])
    if "layers" in answer:
        rows = [
            (index, layer["tokens"], f"{layer['mean_confidence']:.3f}", f"{layer['changed']:.1%}")
            for index, layer in answer["layers"].items()
        ]
        click.echo()
        print_table("what the memory did", ("layer", "tokens", "mean λ", "experts changed"), rows)
