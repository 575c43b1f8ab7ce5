"""What a client is told when its request fails, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from lezero.core.errors import ConfigError
from lezero.serve.request import TooLongError


class Problem(Exception):
    """A request that fails: an HTTP status, and words for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.allow = status, message, allow
        self.param, self.code, self.retry_s = param, code, retry_s

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> list[tuple[str, str]]:
        found = [] if self.retry_s is None else [("retry-after", str(self.retry_s))]
        if self.status == 401:
            found.append(("www-authenticate", "Bearer"))
        if self.allow is not None:
            found.append(("allow", self.allow))
        return found


class ClientGoneError(Exception):
    """The client closed its connection: there is nobody to answer."""


def refused(error: ConfigError) -> Problem:
    """The answer to a value that the engine does not take."""
    param = str(error).partition(":")[0]
    if error.problems:
        param = str(error.problems[0].path[0]) if error.problems[0].path else param
    known = param.partition("[")[0].isidentifier()
    code = "context_length_exceeded" if isinstance(error, TooLongError) else None
    return Problem(400, str(error), param=param if known else None, code=code)
