"""`knn-moe generate`: generate text with and without a memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

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
    print_note,
    print_table,
    print_text,
    seed_option,
)
from knn_moe.errors import ConfigError

if TYPE_CHECKING:
    from knn_moe.memory.memory import RoutingMemory


@click.command(name="generate")
@click.argument("model")
@click.argument("prompt", required=False)
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
@seed_option("sampling and for --control")
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
def command(model: str, prompt: str | None, as_json: bool, **options: Any) -> None:
    """Generate text from PROMPT with MODEL and a memory.

    \b
    knn-moe generate tiny-olmoe "A fever is" --memory memory
    knn-moe generate tiny-olmoe "A fever is" --memory memory --compare --json
    knn-moe generate tiny-olmoe "A fever is" --memory memory --control shuffled
    knn-moe generate tiny-olmoe - --memory memory < prompt.txt

    The text is shown as it comes, and Ctrl-C ends it. With - as PROMPT, or without one in a pipe,
    the prompt is read from standard input.

    After the text, a table shows for each layer the mean confidence (λ) and the share of tokens
    whose experts the memory changed.
    """
    _check_combination(options)
    from knn_moe.memory.memory import RoutingMemory

    memory = None
    if options["memory"] is not None:
        memory = RoutingMemory.from_pretrained(options["memory"])
    given = _read_prompt(prompt) if prompt in (None, "-") else prompt
    network, tokenizer = load_model(model, options["device"], options["dtype"])
    inputs = encode_prompt(tokenizer, given, options["chat"], network.device)
    _check_room(network, inputs, options["max_new_tokens"])
    generator = _Generator(network, tokenizer, inputs, options, shows=not as_json)
    answer: dict[str, Any] = {"prompt": given}
    try:
        if options["compare"]:
            answer["without_memory"] = generator.generate("without memory: ")
            generator.show("\n\n")
        title = "with memory:    " if options["compare"] else ""
        if memory is None:
            answer["text"] = generator.generate(title)
        else:
            answer |= generator.generate_with(memory, title)
        generator.show("\n")
    except KeyboardInterrupt:
        generator.show("\n")
        raise SystemExit(130) from None
    if as_json:
        print_json(answer)
    elif "layers" in answer:
        _show_layers(answer["layers"])


def _read_prompt(asked: str | None) -> str:
    """Read the prompt from standard input, without the line end that a shell adds.

    Raises:
        ConfigError: It is not UTF-8.
    """
    if asked is None and sys.stdin.isatty():
        raise click.UsageError("There is no PROMPT. Give one, or - to type it and end with Ctrl-D.")
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"The prompt on standard input is not UTF-8: byte {error.start} is "
            f"0x{error.object[error.start]:02x}. Convert it to UTF-8."
        ) from None
    return text.replace("\r\n", "\n").removesuffix("\n")


def _check_combination(options: Mapping[str, Any]) -> None:
    """Refuse what cannot be done before anything is loaded."""
    if options["compare"] and options["memory"] is None:
        raise click.UsageError("--compare needs a --memory to compare with.")
    if options["neighbours"] is not None and options["memory"] is None:
        raise click.UsageError("-k needs a --memory to recall from.")
    if options["control"] is not None:
        if options["memory"] is None:
            raise click.UsageError("--control needs a --memory to change.")
        from knn_moe.adapt.controls import CONTROLS

        CONTROLS.find(options["control"])


def _check_room(network: Any, inputs: Mapping[str, Any], wanted: int) -> None:
    """Refuse a prompt that is longer than the context, and say where the text will be shorter."""
    from knn_moe.inference.streaming import room_after

    read = inputs["input_ids"].shape[-1]
    room = room_after(network, read)
    if room < wanted:
        print_note(
            f"After this prompt of {read:,} tokens the model's context has room for {room:,} more, "
            f"so the text ends there at the latest."
        )


@dataclass(frozen=True)
class _Generator:
    """A loaded model and a prompt, for texts that are shown as they come."""

    network: Any
    tokenizer: Any
    inputs: Mapping[str, Any]
    options: Mapping[str, Any]
    shows: bool

    def show(self, piece: str) -> None:
        """Print a piece of text, if this run prints texts."""
        if self.shows:
            print_text(piece, nl=False)

    def generate(self, title: str) -> str:
        """Generate and show a text after its title."""
        from knn_moe.inference.streaming import Reply, Sampling, stream_reply

        names = ("max_new_tokens", "temperature", "seed")
        sampling = Sampling(**{name: self.options[name] for name in names})
        self.show(title)
        reply = Reply(self.tokenizer, self.show)
        stream_reply(self.network, self.inputs, reply, sampling, pad_token(self.tokenizer))
        return reply.text

    def generate_with(self, memory: RoutingMemory, title: str) -> dict[str, Any]:
        """Return the text with the memory attached, and what the memory did in each layer."""
        from knn_moe.adapt.controls import control
        from knn_moe.inference.attach import attach

        options, force = self.options, self.options["force"]
        if options["control"] is not None:
            seed = options["seed"]
            memory = control(memory, options["control"], self.network, seed=seed, force=force)
        neighbours = options["neighbours"]
        config = memory.routing if neighbours is None else replace(memory.routing, k=neighbours)
        with attach(self.network, memory, config, force=force) as routing:
            text = self.generate(title)
            layers = {index: asdict(layer) for index, layer in routing.stats().items()}
        return {"text": text, "layers": layers}


def _show_layers(layers: Mapping[int, Mapping[str, Any]]) -> None:
    rows = [
        (
            index,
            layer["tokens"],
            f"{layer['mean_confidence']:.3f}",
            "-" if layer["changed"] is None else f"{layer['changed']:.1%}",
        )
        for index, layer in layers.items()
    ]
    columns = ("layer", "tokens", "mean λ", "tokens with changed experts")
    click.echo()
    print_table("What the memory did", columns, rows)
