"""A command as a program of its own: it starts soon, ends soon, and Ctrl-C ends it at any moment.

After Ctrl-C the command and its processes end within two seconds, and one line says how to go on.
"""

from __future__ import annotations

import atexit
import gc
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread, Timer, current_thread, main_thread
from types import FrameType
from typing import Final

import click

from knn_moe.support.terminal import one_line

EXIT_CODE: Final = 130
_GRACE: Final = 1.4  # seconds in which a command may end by itself
_SHOW_CURSOR: Final = "\x1b[?25h"


class Program:
    """The process of a command.

    Args:
        arguments: Of the command line, without the program's name.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.exit_code: int | None = None  # unknown until the command has ended
        self._sentence = how_to_continue(arguments)
        self._said = Event()
        self._handles_interrupts = list(arguments[:1]) == ["chat"]  # which goes on after Ctrl-C

    def start(self) -> None:
        """Prepare this process: it runs one command and ends."""
        _open_closed_streams()
        atexit.register(self._leave)  # the first to be registered is the last to be called
        if current_thread() is main_thread() and not self._handles_interrupts:
            here, there = socket.socketpair()
            there.setblocking(False)
            signal.signal(signal.SIGINT, _interrupt_once)
            signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
            Thread(target=self._end_late, args=(here, there), daemon=True).start()

    def say(self) -> None:
        """Say on stderr that the command was interrupted, and how to go on."""
        self._said.set()
        click.echo(self._sentence, err=True)

    def _leave(self) -> None:
        """Leave without taking torch apart, which can take more than a second."""
        if self.exit_code is not None:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):  # nobody reads it any more
                    stream.flush()
            os._exit(self.exit_code)

    def _end_late(self, here: socket.socket, there: socket.socket) -> None:
        """End this process if it has not ended soon after Ctrl-C. `there` stays open as long.

        Python raises KeyboardInterrupt only between two steps of its own, so that a long product of
        matrices, or the end of a thread, would hold it up; the signal wakes this thread directly.
        Files are safe: nothing is published before it is whole.
        """
        from multiprocessing import active_children

        while here.recv(1) != bytes([signal.SIGINT]):
            pass
        time.sleep(_GRACE)
        for child in active_children():
            child.kill()
        if not self._said.is_set():
            cursor = _SHOW_CURSOR if os.isatty(2) else ""  # which a progress bar has hidden
            os.write(2, f"{cursor}\n{self._sentence}\n".encode())
        os._exit(EXIT_CODE)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely while libraries are imported, which saves a sixth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _open_closed_streams() -> None:
    """Read nothing from, and write nowhere to, what a shell has closed (as in `<&-`)."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nothing = Path(os.devnull).open(mode, encoding="utf8")  # noqa: SIM115
            setattr(sys, name, nothing)


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt at the first Ctrl-C: a second must not disturb the cleaning up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.unraisablehook = _interrupt_again
    raise KeyboardInterrupt


def _interrupt_again(lost: sys.UnraisableHookArgs) -> None:
    """Raise KeyboardInterrupt once more, a little later, if Python lost it in a finalizer."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        signal.signal(signal.SIGINT, _interrupt_once)
        again = Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()


def how_to_continue(arguments: Sequence[str]) -> str:
    """Return the sentence that an interrupted command ends with."""
    words = list(arguments)
    if words[:1] == ["eval"]:
        # What was replaced must not be replaced once more; build still has a memory to replace.
        words = [word for word in words if word != "--overwrite"]
    if words[:1] in (["build"], ["eval"]):
        words += [] if "--resume" in words else ["--resume"]
        how = "Continue with"
    elif words[:1] == ["reproduce"] or (words[:1] == ["label"] and _asks_judge(words)):
        how = "The same command continues"
    else:
        return "Interrupted."
    return one_line(f"Interrupted. {how}: {shlex.join(['knn-moe', *words])}")


def _asks_judge(words: Sequence[str]) -> bool:
    return any(word.partition("=")[0] == "--judge" for word in words)
