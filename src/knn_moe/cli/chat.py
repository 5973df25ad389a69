"""`knn-moe chat`: talk to a model with its memories, in a terminal or from a script."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.table import Table

from knn_moe.cli.common import (
    POSITIVE,
    force_option,
    load_model,
    model_options,
    neighbours_option,
    pad_token,
    plain,
    print_note,
    print_text,
    seed_option,
)
from knn_moe.errors import ConfigError
from knn_moe.support.folders import expand_home
from knn_moe.support.registry import unknown_name
from knn_moe.support.terminal import printable

if TYPE_CHECKING:
    from knn_moe.chat.conversation import Prompt
    from knn_moe.chat.session import Session
    from knn_moe.inference.streaming import Reply
    from knn_moe.memory.memory import RoutingMemory

_WIDE: Final = 90  # columns of a terminal that shows two replies side by side
_ALONE: Final = "model alone"


@click.command(name="chat")
@click.argument("model")
@click.option(
    "--memory",
    "memories",
    multiple=True,
    help="Use this memory: a folder or a hub id. Can be repeated; the first one is used until "
    "/memory names another.",
)
@click.option(
    "--max-new-tokens",
    type=POSITIVE,
    default=256,
    show_default=True,
    help="Generate at most this many tokens for a reply.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Sample at this temperature. 0 always takes the most likely token.",
)
@seed_option("sampling")
@neighbours_option
@force_option
@model_options
def command(model: str, memories: tuple[str, ...], **options: Any) -> None:
    """Talk to MODEL, with memories that can be changed on the way.

    \b
    knn-moe chat tiny-olmoe --memory memory
    knn-moe chat tiny-olmoe --memory medicine --memory law
    knn-moe chat tiny-olmoe --memory memory < messages.txt

    A line is a message. It goes through the model's chat template; a model without one continues
    the text. Lines that begin with / are commands, and /help lists them: choose a memory or the
    model alone, compare the two, explain the last reply. Ctrl-C stops a reply, Ctrl-D ends the
    session. Without a terminal each line of standard input is answered, and Ctrl-C ends it.
    """
    if options["neighbours"] is not None and not memories:
        raise click.UsageError("-k needs a --memory to recall from.")
    from knn_moe.chat.session import Session
    from knn_moe.inference.several import attach_all
    from knn_moe.inference.streaming import Sampling
    from knn_moe.memory.memory import RoutingMemory

    opened = {name: RoutingMemory.from_pretrained(place) for name, place in _name(memories).items()}
    network, tokenizer = load_model(model, options["device"], options["dtype"])
    names = ("max_new_tokens", "temperature", "seed")
    sampling = Sampling(**{name: options[name] for name in names})
    with ExitStack() as stack:
        routing = None
        if opened:
            configs = _configs(opened, options["neighbours"])
            handle = attach_all(network, opened, configs, force=options["force"])
            routing = stack.enter_context(handle)
        session = Session(network, tokenizer, routing, sampling, pad_token(tokenizer))
        try:
            _Chat(model, session).run()
        except KeyboardInterrupt:
            click.echo()
            raise SystemExit(130) from None


def _name(memories: tuple[str, ...]) -> dict[str, str]:
    """Name each memory by its folder, or by all that was given where that is not unique."""
    short = [expand_home(memory).resolve().name for memory in memories]
    unique = len(set(short)) == len(short)
    return dict(zip(short if unique else memories, memories, strict=True))


def _configs(memories: Mapping[str, RoutingMemory], neighbours: int | None) -> dict[str, Any]:
    if neighbours is None:
        return {}
    return {name: replace(memory.routing, k=neighbours) for name, memory in memories.items()}


class _Chat:
    """The loop that reads lines and shows replies."""

    def __init__(self, model: str, session: Session) -> None:
        self._model = model
        self._session = session
        self._compares = False
        self._ended = False
        self._interactive = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> None:
        """Answer lines until they end."""
        self._greet()
        for line in self._typed() if self._interactive else _given():
            try:
                self._answer(line)
            except ConfigError as error:
                print_note(str(error))
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                click.echo()
                print_note("Stopped.")
            if self._ended:
                return

    def _greet(self) -> None:
        names = self._session.memories
        memories = f"the memory {self._session.memory}" if names else "no memory"
        others = f"; /memory chooses among {', '.join(names)}" if len(names) > 1 else ""
        print_note(f"{self._model} with {memories}{others}. /help lists the commands.")
        if not self._session.conversation.has_template:
            print_note("The model has no chat template. It continues the text of the conversation.")

    def _typed(self) -> Iterator[str]:
        """Yield the lines that are typed, with the history and editing of readline."""
        with suppress(ImportError):
            import readline  # noqa: F401
        while True:
            try:
                line = input(f"{printable(self._session.memory or 'alone')}> ")
            except KeyboardInterrupt:
                click.echo()
                print_note("/quit or Ctrl-D ends the session.")
            except UnicodeDecodeError:
                print_note("This line is not UTF-8. Type it again.")
            except EOFError:
                click.echo()
                return
            else:
                yield line

    def _answer(self, line: str) -> None:
        text = line.strip()
        if text.startswith("//"):
            self._reply(text[1:])
        elif text.startswith("/"):
            name, _, rest = text.partition(" ")
            if name not in _COMMANDS:
                raise ConfigError(unknown_name("command", name, _COMMANDS))
            _COMMANDS[name].run(self, rest.strip())
        elif text:
            self._reply(text)

    def _reply(self, message: str) -> None:
        """Show the reply to a message, and make both part of the conversation.

        So is a reply that was stopped, as far as it came.
        """
        from knn_moe.inference.streaming import Reply

        session, tokenizer = self._session, self._session.conversation.tokenizer
        prompt = session.prompt(message)
        if prompt.dropped:
            turns = "turn is" if prompt.dropped == 1 else f"{prompt.dropped} turns are"
            print_note(
                f"The conversation is longer than the model's context: the oldest {turns} dropped."
            )
        beside = self._compares and session.memory is not None
        quiet = beside and self._interactive and _columns() >= _WIDE
        show = _show_nothing if quiet else _show_piece
        alone, reply = Reply(tokenizer, show), Reply(tokenizer, show)
        try:
            if quiet:
                self._show_side_by_side(prompt, alone, reply)
            elif beside:
                self._stream(prompt, None, alone, f"{_ALONE}: ")
                self._stream(prompt, session.memory, reply, f"{session.memory}: ")
            else:
                self._stream(prompt, session.memory, reply)
        finally:
            if reply.ids:
                session.keep(message, reply)

    def _stream(self, prompt: Prompt, memory: str | None, reply: Reply, title: str = "") -> None:
        print_text(title, nl=False)
        self._session.generate(prompt, memory, reply)
        click.echo()

    def _show_side_by_side(self, prompt: Prompt, alone: Reply, reply: Reply) -> None:
        name = self._session.memory
        console = Console(highlight=False)

        def draw() -> Table:
            table = Table(expand=True, box=SIMPLE)
            for title in (_ALONE, name or ""):
                table.add_column(plain(title), ratio=1)
            table.add_row(plain(alone.text.strip()), plain(reply.text.strip()))
            return table

        try:
            with Live(get_renderable=draw, console=console, transient=True):
                self._session.generate(prompt, None, alone)
                self._session.generate(prompt, name, reply)
        finally:
            console.print(draw())

    def choose(self, name: str) -> None:
        """Use the memory `name`, or list all."""
        session = self._session
        session.check_memories()
        if name:
            session.use(name)
            print_note(f"Replies use the memory {name}.")
            return
        for one in session.memories:
            print_text(f"{one} (in use)" if one == session.memory else one)

    def turn_off(self, _: str) -> None:
        """Use the model alone."""
        self._session.use(None)
        print_note("Replies are by the model alone.")

    def compare(self, _: str) -> None:
        """Begin or end showing the model alone beside each reply."""
        self._session.check_memories()
        self._compares = not self._compares
        which = "also shown by the model alone" if self._compares else "shown once"
        off = self._compares and self._session.memory is None
        hint = " No memory is in use: choose one with /memory." if off else ""
        print_note(f"Replies are {which}.{hint}")

    def explain(self, page: str) -> None:
        """Show the explanation of the last reply, or write its page."""
        found, memory = self._session.explain()
        explanation = replace(found, model=self._model, memory=f"the memory {memory}")
        if page:
            try:
                explanation.save(expand_home(page))
            except OSError as error:
                raise ConfigError(f"Cannot write {page!r}: {error.strerror}.") from None
            print_note(f"Wrote {page}.")
        elif not explanation.layers:
            print_text("The memory does not route: it is attached to no layer.")
        else:
            print_text(explanation.table(width=max(_columns(), 60)))

    def reset(self, _: str) -> None:
        """Forget the conversation."""
        self._session.reset()
        print_note("The conversation is forgotten.")

    def show_help(self, _: str) -> None:
        """List the commands."""
        width = max(len(one.usage) for one in _COMMANDS.values())
        lines = [f"{one.usage:<{width}}  {one.help}" for one in _COMMANDS.values()]
        lines += ["Ctrl-C stops a reply. A message that begins with / is written with //."]
        print_text("\n".join(lines))

    def quit(self, _: str) -> None:
        """End the session."""
        self._ended = True


@dataclass(frozen=True)
class _Command:
    """What a line that begins with / calls, with the rest of it."""

    usage: str
    help: str
    run: Callable[[_Chat, str], None]


_COMMANDS: Final[Mapping[str, _Command]] = {
    "/memory": _Command(
        "/memory [NAME]", "Use this memory. Without NAME: list them.", _Chat.choose
    ),
    "/off": _Command("/off", "Use the model alone.", _Chat.turn_off),
    "/compare": _Command(
        "/compare", "Show each reply also by the model alone, or no longer.", _Chat.compare
    ),
    "/explain": _Command(
        "/explain [FILE]",
        "Explain the last reply: what was recalled for each token. With FILE: as an HTML page.",
        _Chat.explain,
    ),
    "/reset": _Command("/reset", "Forget the conversation.", _Chat.reset),
    "/help": _Command("/help", "Show this list.", _Chat.show_help),
    "/quit": _Command("/quit", "End the session, as Ctrl-D does.", _Chat.quit),
}


def _given() -> Iterator[str]:
    """Yield the lines of standard input.

    Raises:
        ConfigError: One is not UTF-8.
    """
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise ConfigError(
                f"Line {number} of standard input is not UTF-8. Convert it to UTF-8."
            ) from None


def _columns() -> int:
    return shutil.get_terminal_size().columns


def _show_piece(piece: str) -> None:
    print_text(piece, nl=False)


def _show_nothing(piece: str) -> None:
    pass
