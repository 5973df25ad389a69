"""The server: its socket, its signals and its end. The only file that imports uvicorn.

SIGTERM drains it: requests that run are answered, new ones get 503. A second SIGTERM, or Ctrl-C,
ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from knn_moe.errors import ServeError
from knn_moe.serve.guard import BODY_SECONDS, Guard
from knn_moe.serve.openai_api import make_app
from knn_moe.serve.service import Service

_CONNECTIONS: Final = 800  # of the 1,024 files that a process usually may open
_IDLE_SECONDS: Final = 75  # that a connection without a request stays open
_STOP_SECONDS: Final = 0.8  # in which a step of the model should end


def open_socket(host: str, port: int) -> socket.socket:
    """Take a port, before anything slow is done; it refuses connections until the server runs.

    Raises:
        ServeError: It cannot be taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        taken = socket.socket(family, kind, protocol)
        try:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
        except BaseException:
            taken.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ServeError(
            f"Cannot listen on {host} port {port}: {reason}. Choose another --host or --port."
        ) from None
    return taken


def run_server(
    service: Service, taken: socket.socket, on_ready: Callable[[Callable[[], None]], None]
) -> None:
    """Serve until the process is told to stop.

    Args:
        service: Answers requests.
        taken: From `open_socket`.
        on_ready: Called when requests are taken, with a function that drains the server as SIGTERM
            does; it may be called in any thread.

    Raises:
        ServeError: The engine failed.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    try:
        interrupted = asyncio.run(_serve(service, taken, on_ready))
    finally:
        service.engine.stop(_STOP_SECONDS)
        taken.close()
    if interrupted:
        raise KeyboardInterrupt
    if service.engine.failure is not None:
        raise ServeError(f"The model stopped running: {service.engine.failure}.")


async def _serve(
    service: Service, taken: socket.socket, on_ready: Callable[[Callable[[], None]], None]
) -> bool:
    """Serve, and return whether Ctrl-C ended it."""
    guard = Guard(make_app(service), service.config.api_key, service.metrics.on_refused)
    config = uvicorn.Config(
        guard,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=2,
    )
    server = _Server(config)
    loop = asyncio.get_running_loop()
    drain = _Drain(service, guard, server)

    def begin() -> None:
        loop.call_soon_threadsafe(drain.begin)

    def interrupt() -> None:
        loop.call_soon_threadsafe(server.interrupt)

    service.engine.when_failed = begin  # requests that ran are told so
    with _handled({signal.SIGTERM: begin, signal.SIGINT: interrupt}):
        await server.serve_when_ready(taken, lambda: on_ready(begin))
    return server.interrupted


class _Server(uvicorn.Server):
    """uvicorn without its signals."""

    interrupted = False
    _serving: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def serve_when_ready(self, taken: socket.socket, on_ready: Callable[[], None]) -> None:
        """Serve on a socket, and say when that has begun."""
        serving = self._serving = asyncio.ensure_future(self.serve([taken]))
        try:
            while not self.started and not serving.done():
                await asyncio.sleep(0.01)
            if self.started:
                on_ready()
            await asyncio.wait([serving])
            if not serving.cancelled():
                serving.result()
        finally:
            serving.cancel()

    def interrupt(self) -> None:
        """End as at Ctrl-C."""
        self.interrupted = True
        self.end()

    def end(self) -> None:
        """End without waiting for anybody. What is cut off is no error."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        if self._serving is not None:
            self._serving.cancel()


class _Drain:
    """Ends a server after the requests that run."""

    def __init__(self, service: Service, guard: Guard, server: _Server) -> None:
        self._service = service
        self._guard = guard
        self._server = server
        self._waiting: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Take no more requests, and end after the last; the second time, at once."""
        if self._waiting is not None:
            self._server.end()
            return
        self._service.draining = self._guard.draining = True
        self._waiting = asyncio.ensure_future(self._wait())

    async def _wait(self) -> None:
        while self._guard.active:
            await self._guard.idle.wait()
        self._service.engine.close()
        self._server.should_exit = True


@contextmanager
def _handled(handlers: Mapping[signal.Signals, Callable[[], None]]) -> Generator[None]:
    """Call functions at signals.

    Not by the loop's own handlers, which would take the file that wakes the process at Ctrl-C; and
    no exception is raised, which could come anywhere and be swallowed there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda number, frame: handlers[signal.Signals(number)]())
        for number in handlers
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Protocol(H11Protocol):
    """A connection that is closed if it sends no whole request head in time."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._late = self.loop.call_later(BODY_SECONDS, self._close_late)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _close_late(self) -> None:
        if getattr(self, "cycle", None) is None:
            self.transport.abort()
