"""Prompts to label, and a judge on this machine that speaks the protocol of OpenAI's endpoint."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from knn_moe import LabelConfig

PROMPTS = [
    "She opened the door and",
    "The patient had a fever and a cough, and the doctor",
    "import os\nimport sys\n\n\ndef main():\n    for name in sys.argv[1:]:\n        print(",
    "The court held that",
    "Once upon a time there was a little",
    "The square of a number is",
]
SHORT = LabelConfig(max_new_tokens=8, batch_size=4)
KEY = "sk-a-key-that-nobody-may-see"


def write_prompts(path: Path) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return path


@dataclass
class Endpoint:
    """A judge's server: the requests it got, and the replies it will give."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Message] = field(default_factory=list)
    replies: list[tuple[int, Any]] = field(default_factory=list)  # the last one is repeated
    error_headers: dict[str, str] = field(default_factory=dict)


@contextmanager
def serve_endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            endpoint.requests.append({"path": self.path, **body})
            endpoint.headers.append(self.headers)
            number = min(len(endpoint.requests), len(endpoint.replies)) - 1
            status, reply = endpoint.replies[number]
            reply = reply(body) if callable(reply) else reply
            content = {"choices": [{"message": {"role": "assistant", "content": reply}}]}
            data = reply if isinstance(reply, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in endpoint.error_headers.items() if status != 200 else ():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield endpoint
        server.shutdown()
        thread.join()
