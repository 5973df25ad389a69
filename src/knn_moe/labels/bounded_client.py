"""huggingface_hub's client for chat completions, with bounds on what a server can do to it.

The client says what is sent and reads what comes back; the request itself is made here. Redirects
are not followed, compressed replies are not unpacked, and a long reply is cut off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub import AsyncInferenceClient, get_async_session

from knn_moe.errors import LabelError


class BoundedClient(AsyncInferenceClient):
    """A client for one request to `address`, which records the server's reply.

    Args:
        address: The whole address of the endpoint.
        key: Sent as a bearer token. None: nothing is sent, not even the key for the hub.
        longest: The most bytes of a reply.
    """

    def __init__(self, address: str, key: str | None, longest: int) -> None:
        # The client would use the key for the hub if it had none.
        super().__init__(base_url=address, api_key=key or "none")
        self.address, self.key, self.longest = address, key, longest
        self.status: int | None = None
        self.headers_received: Mapping[str, str] = {}
        self.body = b""
        self.complete = False

    async def _inner_post(  # type: ignore[override]  # it has overloads for streams
        self, request_parameters: Any, *, stream: bool = False
    ) -> bytes:
        """Make a request to the inference server."""
        headers = {**request_parameters.headers, "accept-encoding": "identity"}
        if self.key is None:
            headers.pop("authorization", None)
        async with get_async_session() as session:
            # The hub's hooks refuse to work offline and read replies of any length.
            session.event_hooks = {"request": [], "response": []}
            async with session.stream(
                "POST",
                self.address,
                json=request_parameters.json,
                headers=headers,
                follow_redirects=False,
            ) as response:
                self.status, self.headers_received = response.status_code, response.headers
                async for piece in response.aiter_raw():
                    self.body += piece
                    if len(self.body) > self.longest:
                        raise LabelError(
                            f"The reply of {self.address} is longer than {self.longest:,} bytes."
                        )
        self.complete = True
        if not 200 <= self.status < 300:
            raise ValueError(self.status)
        return self.body
