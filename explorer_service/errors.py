"""Answers that are errors, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

RETRY_AFTER_S = 2


class ApiError(Exception):
    """Raised anywhere in a request; the app turns it into the answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | int | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return Response(self.body(), self.status, headers, media_type="application/json")


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def unavailable(message: str, code: str) -> ApiError:
    """503 with Retry-After: the caller did nothing wrong and may try again."""
    return ApiError(503, message, kind="service_unavailable", code=code, retry_after_s=RETRY_AFTER_S)


def our_fault() -> ApiError:
    """What a caller hears of a bug."""
    return ApiError(500, "an error of the server; its log has the details", kind="server_error")


def body_too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes (explorer.max_body_bytes)", code="body_too_large")


def body_too_slow(limit_s: float) -> ApiError:
    reason = f"the body was not there within {limit_s:g} s (explorer.body_timeout_s)"
    return ApiError(408, reason, code="body_too_slow")
