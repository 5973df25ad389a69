"""What stands before every endpoint: the API key, the drain, limits, and clients that go away.

Knows ASGI; nothing of models.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, MutableMapping
from contextlib import aclosing, suppress
from typing import Any, Final, TypeAlias, TypeVar

from knn_moe.serve.refused import RefusedError

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Result = TypeVar("Result")

BODY_SECONDS: Final = 30.0  # in which a client sends its request
_STALLED_SECONDS: Final = 60.0  # that a client may let a part of its answer wait
_OPEN: Final = ("/", "/favicon.ico", "/health")  # need no key: they tell nothing
_WHILE_DRAINING: Final = ("/health", "/metrics")


class Guard:
    """The application with what stands before it.

    Args:
        app: The endpoints.
        api_key: What clients must send; None: nothing.
        on_refused: Called with the status of each request that is refused here.
    """

    def __init__(self, app: App, api_key: str | None, on_refused: Callable[[int], None]) -> None:
        self.draining = False
        self.active = 0  # requests
        self.idle = asyncio.Event()  # set while there are none
        self.idle.set()
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        self.active += 1
        self.idle.clear()
        try:
            refused = self._check(scope)
            if refused is None:
                await self._app(scope, receive, send)
            else:
                self._on_refused(refused.status)
                await send_json(send, refused.status, refused.to_dict(), refused.headers)
        except OSError:
            pass  # the client went away
        finally:
            self.active -= 1
            if not self.active:
                self.idle.set()

    def _check(self, scope: Scope) -> RefusedError | None:
        path = scope["path"]
        if self._key is not None and path not in _OPEN and not self._has_key(scope):
            return RefusedError(
                "This server needs its API key: Authorization: Bearer KEY.",
                status=401,
                code="invalid_api_key",
            )
        if self.draining and path not in _WHILE_DRAINING:
            message = "The server is stopping and takes no more requests."
            return RefusedError(message, status=503, code="stopping")
        return None

    def _has_key(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        assert self._key is not None
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)


async def send_json(
    send: Send, status: int, body: object, headers: Mapping[str, str] | None = None
) -> None:
    """Send a whole response."""
    content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    head = {"content-type": "application/json", "content-length": str(len(content))}
    named = [(name.lower().encode(), value.encode()) for name, value in head.items()]
    named += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": named})
    await send({"type": "http.response.body", "body": content})


async def read_json(scope: Scope, receive: Receive, most: int) -> object:
    """Read the body of a request.

    Raises:
        RefusedError: It is too long, too slow, or no JSON.
        ConnectionResetError: The client went away.
    """
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise RefusedError("Send JSON, with Content-Type: application/json.", status=415)
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > most:
        raise _too_long(most)
    try:
        body = await asyncio.wait_for(_read(receive, most), BODY_SECONDS)
    except TimeoutError:
        message = f"The request did not come within {BODY_SECONDS:g} seconds."
        raise RefusedError(message, status=408) from None
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError):
        raise RefusedError("The body of the request is no JSON.") from None


async def _read(receive: Receive, most: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError
        body += message.get("body", b"")
        if len(body) > most:
            raise _too_long(most)
        if not message.get("more_body"):
            return bytes(body)


def _too_long(most: int) -> RefusedError:
    return RefusedError(f"The request is longer than {most:,} bytes.", status=413)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do `work` unless the client goes away.

    Raises:
        ConnectionResetError: It did.
    """
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ConnectionResetError
    finally:
        for task in (doing, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_events(send: Send, chunks: AsyncGenerator[Any]) -> None:
    """Send a stream of server-sent events, and close `chunks` whatever happens.

    Raises:
        ConnectionResetError: The client reads nothing for too long.
    """
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
    ]
    async with aclosing(chunks):
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for chunk in chunks:
            text = json.dumps(chunk, ensure_ascii=False, allow_nan=False)
            await _send_soon(send, f"data: {text}\n\n".encode(), more=True)
        await _send_soon(send, b"data: [DONE]\n\n", more=False)


async def _send_soon(send: Send, body: bytes, *, more: bool) -> None:
    message = {"type": "http.response.body", "body": body, "more_body": more}
    try:
        await asyncio.wait_for(send(message), _STALLED_SECONDS)
    except TimeoutError:
        raise ConnectionResetError from None
