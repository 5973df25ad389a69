"""`knn-moe serve`: an OpenAI-compatible server of a model and its memories."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import click

from knn_moe.cli.common import (
    FOLDER,
    POSITIVE,
    force_option,
    load_model,
    model_options,
    neighbours_option,
    print_note,
)
from knn_moe.errors import MissingDependencyError
from knn_moe.support.embedded_models import public_name
from knn_moe.support.folders import expand_home

if TYPE_CHECKING:
    from knn_moe.serve.service import Service

_KEY: Final = "KNN_MOE_API_KEY"
_TRANSFORMERS: Final = 5, 22  # whose continuous batching the server uses
_PROBES: Final = ("The server answers requests.", "A memory belongs to one model, and to no other.")


@click.command(name="serve")
@click.argument("model")
@click.option(
    "--memory",
    "memories",
    multiple=True,
    metavar="NAME=FOLDER",
    help="Serve this memory under NAME: a folder or a hub id. Can be repeated.",
)
@click.option("--name", help="The name of the model without a memory. Default: as MODEL.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Listen on this address.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Listen on this port. 0: any free one.",
)
@click.option(
    "--api-key",
    envvar=_KEY,
    show_envvar=True,
    help="Refuse requests without this key. On a command line other users of the machine can read "
    "it.",
)
@click.option(
    "--allow-loading",
    "folder",
    type=FOLDER,
    help="Let clients load memories from this folder, and unload any, at run time.",
)
@click.option(
    "--at-once",
    type=POSITIVE,
    default=32,
    show_default=True,
    help="Generate at most this many answers at the same time.",
)
@click.option(
    "--max-waiting",
    type=click.IntRange(min=0),
    default=256,
    show_default=True,
    help="Let at most this many answers wait beyond those; refuse more with 429.",
)
@click.option(
    "--max-tokens",
    type=POSITIVE,
    help="Generate at most this many tokens for an answer. Default: what the context has room for.",
)
@click.option(
    "--max-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    help="End an answer after this time.",
)
@click.option(
    "--max-request-bytes",
    type=POSITIVE,
    default=1 << 20,
    show_default=True,
    help="Refuse longer requests.",
)
@click.option(
    "--max-explained",
    type=click.IntRange(min=0),
    default=1024,
    show_default=True,
    help="Explain answers of at most this many tokens, with their prompts. 0: explain none, and "
    "show nobody the texts of memories.",
)
@click.option(
    "--cache-tokens",
    type=POSITIVE,
    help="Keep at most this many tokens in the attention cache, of all answers together. Default: "
    "32768, or one whole context if that is more.",
)
@neighbours_option
@force_option
@model_options
def command(model: str, memories: tuple[str, ...], **options: Any) -> None:
    """Serve MODEL and its memories to OpenAI's clients.

    \b
    knn-moe serve tiny-olmoe --memory python=memory
    knn-moe serve tiny-olmoe --memory medical=medicine --memory law=law --port 8080
    knn-moe serve tiny-olmoe --allow-loading memories

    Each memory is a model of its own: a request names it, and each of its tokens is routed by that
    memory and no other, also where many requests run in one batch. SIGTERM lets running requests
    finish; Ctrl-C ends at once.
    """
    places = _places(memories)
    if options["neighbours"] is not None and not (places or options["folder"]):
        raise click.UsageError("-k needs a --memory to recall from.")
    if options["api_key"] == "":
        raise click.UsageError(f"The API key is empty. Give one, or unset {_KEY}.")
    _check_installed()
    from knn_moe.memory.memory import RoutingMemory
    from knn_moe.serve.server import open_socket, run_server

    opened = {name: RoutingMemory.from_pretrained(place) for name, place in places.items()}
    taken = open_socket(options["host"], options["port"])
    try:
        service = _make_service(model, options)
    except BaseException:
        taken.close()
        raise
    try:
        for name, memory in opened.items():
            service.load(name, memory)
    except BaseException:
        service.engine.stop()
        taken.close()
        raise
    host = f"[{options['host']}]" if ":" in options["host"] else options["host"]
    address = f"http://{host}:{taken.getsockname()[1]}"
    run_server(service, taken, lambda _: _greet(service, address))


def _places(memories: tuple[str, ...]) -> dict[str, str]:
    """Return the memories by name."""
    places: dict[str, str] = {}
    for given in memories:
        name, sign, place = given.partition("=")
        if not (name and sign and place):
            raise click.UsageError(
                f"--memory takes a name and a folder, as in law=memories/law; got {given!r}."
            )
        if name in places:
            raise click.UsageError(f"There are two memories named {name!r}. Choose another name.")
        places[name] = place
    return places


def _check_installed() -> None:
    for package in ("fastapi", "prometheus_client", "uvicorn"):
        if find_spec(package) is None:
            raise MissingDependencyError(
                f"The server needs {package}: pip install 'knn-moe[serve]'."
            )
    from transformers import __version__

    installed = tuple(int(part) for part in __version__.split(".")[:2])
    if installed < _TRANSFORMERS:
        oldest = ".".join(map(str, _TRANSFORMERS))
        raise MissingDependencyError(
            f"The server needs transformers {oldest} or newer, and {__version__} is installed: "
            f"pip install 'transformers>={oldest}'."
        )


def _make_service(model: str, options: dict[str, Any]) -> Service:
    from knn_moe.serve.answering import Limits
    from knn_moe.serve.engine import Engine, EngineConfig
    from knn_moe.serve.service import Service, ServiceConfig, check_name, end_tokens

    name = options["name"] or _default_name(model)
    check_name(name)
    network, tokenizer = load_model(model, options["device"], options["dtype"])
    config = ServiceConfig(
        name=name,
        limits=Limits(
            request_bytes=options["max_request_bytes"],
            tokens=options["max_tokens"],
            seconds=options["max_seconds"],
            explained=options["max_explained"],
        ),
        api_key=options["api_key"],
        folder=options["folder"],
        neighbours=options["neighbours"],
        force=options["force"],
    )
    engine = Engine(
        network,
        EngineConfig(
            at_once=options["at_once"],
            waiting=options["max_waiting"],
            cache_tokens=options["cache_tokens"],
        ),
        [tokenizer(text)["input_ids"] or [0] for text in _PROBES],
    )
    vocabulary = network.get_input_embeddings().num_embeddings
    return Service(engine, tokenizer, end_tokens(network, tokenizer), vocabulary, config)


def _default_name(model: str) -> str:
    """Return the embedded model's name or hub id as it is, and the last part of a folder."""
    place = expand_home(model)
    return place.resolve().name if place.is_dir() else public_name(model)


def _greet(service: Service, address: str) -> None:
    names = service.engine.memories
    memories = f"with the memories {', '.join(names)}" if names else "without a memory"
    reason = service.engine.why_one_by_one
    if reason is not None:
        print_note(f"transformers cannot batch this model ({reason}): one answer at a time.")
    if not service.encoder.has_template:
        print_note("The model has no chat template: it continues the text of a conversation.")
    print_note(f"Serving {service.config.name} {memories} on {address}/v1")
    print_note(f"Try it in a browser: {address}/")
