"""Why a request is refused, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_KINDS: Final = {401: "authentication_error", 429: "rate_limit_error"}


class RefusedError(Exception):
    """A request is not answered.

    Args:
        message: One sentence that says what is wrong, and what to do.
        status: HTTP's.
        param: The field of the request that is wrong.
        code: A word for programs.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of the response."""
        return {"Retry-After": "1"} if self.status in (429, 503) else {}

    def to_dict(self) -> dict[str, Any]:
        """Return the body of the response."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _KINDS.get(self.status, usual),
                "param": self.param,
                "code": self.code,
            }
        }
