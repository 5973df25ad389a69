"""Servers that behave badly, on this machine: a judge's request ends in time, in a named error.

Each fault is one request to a server that shows one behaviour. It must end with a LabelError in one
line that does not show the key, or with a verdict where the reply has one.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from campaigns.tally import Tally
from knn_moe.errors import LabelError
from knn_moe.labels.endpoint import EndpointJudge

KEY = "sk-a-key-that-nobody-may-see"
TIMEOUT = 0.5  # seconds of a request
_LATEST = 30.0  # seconds after which a request counts as hanging: this machine may be busy

_GOOD = {"choices": [{"message": {"role": "assistant", "content": "8"}}]}
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def _reply(body: bytes, *, status: str = "200 OK", headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode("latin-1") + body


def _content(value: object) -> bytes:
    return _reply(json.dumps({"choices": [{"message": {"content": value}}]}).encode())


_BODY = json.dumps(_GOOD).encode()
_DEEP = b"[" * 200_000 + b"]" * 200_000
_BOMB = gzip.compress(gzip.compress(bytes(1 << 28)))  # 256 MB

# What a server sends before it closes the connection, and whether there is a verdict in it. None: a
# client may be strict or tolerant.
SENT: dict[str, tuple[bytes, bool | None]] = {
    "good reply": (_reply(_BODY), True),
    "no length": (_HEAD + b"\r\n" + _BODY, True),
    "another content type": (_reply(_BODY, headers="Content-Type: text/html\r\n"), True),
    "a verdict that is no number": (_content("maybe"), True),
    "a verdict out of range": (_content("11"), True),
    "a verdict of many digits": (_content("9" * 100_000), True),
    "null content": (_content(None), True),
    "more fields": (_reply(json.dumps({**_GOOD, "x": {"y": [1]}}).encode()), True),
    "nothing": (b"", False),
    "half a status line": (b"HTTP/1.", False),
    "not HTTP": (b"220 mail.example ESMTP\r\n", False),
    "another version": (b"HTTP/9.9 200 OK\r\n\r\n", False),
    "a status of letters": (b"HTTP/1.1 abc OK\r\n\r\n", False),
    "a status of 999": (_reply(b"", status="999 Odd"), False),
    "headers without end": (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000, False),
    "a header without end": (b"HTTP/1.1 200 OK\r\nX: " + b"y" * (1 << 22), False),
    "a header of bytes": (b"HTTP/1.1 200 OK\r\nX\xff\x00: \xfe\r\n\r\n" + _BODY, None),
    "two lengths": (_HEAD + b"Content-Length: 3\r\nContent-Length: 5\r\n\r\nabc", False),
    "a negative length": (_HEAD + b"Content-Length: -1\r\n\r\n" + _BODY, None),
    "a length that is too long": (_HEAD + b"Content-Length: 99999\r\n\r\n" + _BODY, False),
    "a length that is too short": (_HEAD + b"Content-Length: 3\r\n\r\n" + _BODY, False),
    "bad chunks": (_HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + _BODY, False),
    "a huge chunk": (_HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffff\r\n{", False),
    "chunks without end": (_HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n", False),
    "HTTP 302": (_reply(b"", status="302 Found", headers="Location: /v1\r\n"), False),
    "redirect to a file": (_reply(b"", status="301 x", headers="Location: file:///x\r\n"), False),
    "HTTP 304": (_reply(b"", status="304 Not Modified"), False),
    "HTTP 400": (_reply(b'{"error": {"message": "no"}}', status="400 Bad"), False),
    "HTTP 401 with the key": (_reply(KEY.encode(), status="401 No"), False),
    "HTTP 404": (_reply(b"<html>\n" * 100, status="404 Not Found"), False),
    "HTTP 422": (_reply(b'{"errors": [1, null]}', status="422 x"), False),
    "HTTP 429, later": (_reply(b"", status="429 x", headers="Retry-After: 0\r\n"), False),
    "HTTP 429, never": (_reply(b"", status="429 x", headers="Retry-After: nan\r\n"), False),
    "HTTP 500": (_reply(b"\xff\xfe\x00", status="500 x"), False),
    "HTTP 503": (_reply(b"busy", status="503 x"), False),
    "HTTP 504": (_reply(b"", status="504 x"), False),
    "an endless error": (_reply(b"x" * (1 << 23), status="500 x"), False),
    "a huge reply": (_reply(b'{"choices": "' + b"x" * (1 << 23) + b'"}'), False),
    "a bomb": (_reply(_BOMB, headers="Content-Encoding: gzip, gzip\r\n"), False),
    "broken gzip": (_reply(b"\x1f\x8b\x00", headers="Content-Encoding: gzip\r\n"), False),
    "an empty body": (_reply(b""), False),
    "HTTP 204": (b"HTTP/1.1 204 No Content\r\n\r\n", False),
    "not JSON": (_reply(b"<html>"), False),
    "half of JSON": (_reply(_BODY[:-5]), False),
    "deep JSON": (_reply(_DEEP), False),
    "deep JSON inside": (_reply(b'{"choices": ' + _DEEP + b"}"), False),
    "another encoding": (_reply(json.dumps(_GOOD).encode("utf-16")), None),
    "bytes": (_reply(bytes(range(256))), False),
    "a list": (_reply(b"[]"), False),
    "NaN": (_reply(b"NaN"), False),
    "null": (_reply(b"null"), False),
    "a long number": (_reply(b"9" * 100_000), False),
    "no choices": (_reply(b"{}"), False),
    "empty choices": (_reply(b'{"choices": []}'), False),
    "null choices": (_reply(b'{"choices": null}'), False),
    "choices of a number": (_reply(b'{"choices": 7}'), False),
    "a null choice": (_reply(b'{"choices": [null]}'), False),
    "no message": (_reply(b'{"choices": [{}]}'), False),
    "a message of text": (_reply(b'{"choices": [{"message": "8"}]}'), False),
    "content of a number": (_content(8), False),
    "content of a list": (_content([8]), False),
    "an error in place of a reply": (_reply(b'{"error": "no"}'), False),
}


def _drip(connection: socket.socket, start: bytes, piece: bytes = b"x") -> None:
    """Send a byte at a time, each well within the time that a read may take."""
    connection.sendall(start)
    while True:
        connection.sendall(piece)
        time.sleep(TIMEOUT / 10)


def _flood(connection: socket.socket, start: bytes, piece: bytes) -> None:
    connection.sendall(start)
    while True:
        connection.sendall(piece)


def _reset(connection: socket.socket, start: bytes) -> None:
    connection.sendall(start)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _hang(connection: socket.socket, start: bytes) -> None:
    connection.sendall(start)
    while connection.recv(1 << 16):  # until the other side gives up
        pass


_LONG = _HEAD + b"Content-Length: 1000000000\r\n\r\n"
_CHUNKS = _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
# What a server does with a connection; there is never a verdict.
DONE: dict[str, Callable[[socket.socket], None]] = {
    "hangs at once": lambda it: _hang(it, b""),
    "hangs in the status line": lambda it: _hang(it, b"HTTP/1.1 2"),
    "hangs in the headers": lambda it: _hang(it, _HEAD),
    "hangs in the body": lambda it: _hang(it, _LONG + b"{"),
    "hangs after a redirect": lambda it: _hang(it, b"HTTP/1.1 302 x\r\nLocation: /\r\n\r\n"),
    "hangs in an error": lambda it: _hang(it, b"HTTP/1.1 500 x\r\nContent-Length: 9\r\n\r\n"),
    "drips the status line": lambda it: _drip(it, b"HTTP/1.1 200 "),
    "drips the headers": lambda it: _drip(it, _HEAD, b"X: y\r\n"),
    "drips the body": lambda it: _drip(it, _LONG),
    "drips chunks": lambda it: _drip(it, _CHUNKS, b"1\r\nx\r\n"),
    "drips an error": lambda it: _drip(it, b"HTTP/1.1 400 x\r\n\r\n"),
    "drips 100 Continue": lambda it: _drip(it, b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "floods the headers": lambda it: _flood(it, _HEAD, b"X: y\r\n" * 1000),
    "floods the body": lambda it: _flood(it, _LONG, b"x" * (1 << 16)),
    "floods chunks": lambda it: _flood(it, _CHUNKS, b"10000\r\n" + b"x" * (1 << 16) + b"\r\n"),
    "floods 100 Continue": lambda it: _flood(it, b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "resets at once": lambda it: _reset(it, b""),
    "resets in the headers": lambda it: _reset(it, _HEAD),
    "resets in the body": lambda it: _reset(it, _LONG + b"{"),
}
REFUSES = "refuses the connection"


def run(count: int, seed: int, scratch: Path) -> Tally:
    """Make `count` requests: every behaviour in turn, in an order drawn from `seed`."""
    behaviours = [*SENT, *DONE, REFUSES]
    random.Random(seed).shuffle(behaviours)
    tally = Tally("endpoints")
    for number in range(count):
        name = behaviours[number % len(behaviours)]
        kind = name.partition(" ")[0] if name in DONE or name == REFUSES else "sends"
        found = _ask(name)
        if found is None:
            tally.passed(kind)
        else:
            tally.failed(kind, f"{name}: {found}")
    return tally


def _ask(name: str) -> str | None:
    """Ask a server that behaves so, and return what went wrong, or None."""
    ended: list[object] = []

    def ask(url: str) -> None:
        judge = EndpointJudge(url, "judge", api_key=KEY, timeout=TIMEOUT, retries=1, pause=0.0)
        try:
            ended.append(judge("Who?", "She."))
        except BaseException as error:  # any but a LabelError is a failure
            ended.append(error)

    with serve_badly(name) as url:
        thread = threading.Thread(target=ask, args=(url,), daemon=True)
        thread.start()
        thread.join(_LATEST)
    if not ended:
        return f"it hangs for more than {_LATEST:g} seconds"
    result = ended[0]
    expected = SENT[name][1] if name in SENT else False
    if expected is not False and isinstance(result, float):
        return None if math.isnan(result) or 0 <= result <= 1 else f"the verdict is {result!r}"
    if expected:
        return f"there is no verdict: {result!r}"
    if not isinstance(result, LabelError):
        return f"{type(result).__name__}: {result}"
    text = str(result)
    if KEY in text or len(text.splitlines()) != 1 or len(text) > 600:
        return f"the message is {text!r}"
    return None


@contextmanager
def serve_badly(name: str) -> Iterator[str]:
    """Serve on a port of this machine, and yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        if name == REFUSES:
            server.close()
        else:
            threading.Thread(target=_accept, args=(server, name), daemon=True).start()
        yield url
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # ends the thread


def _accept(server: socket.socket, name: str) -> None:
    with suppress(OSError):
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_behave, args=(connection, name), daemon=True).start()


def _behave(connection: socket.socket, name: str) -> None:
    with connection, suppress(OSError):  # the other side may end first
        received = b""
        while not received.endswith(b"}") and (piece := connection.recv(1 << 16)):
            received += piece
        if name in DONE:
            DONE[name](connection)
        else:
            connection.sendall(SENT[name][0])
