"""Error responses, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

Only this module converts an exception to an HTTP status; handlers do not catch exceptions. `ApiError` is for errors of
HTTP itself: a wrong body, a missing key, an exhausted limit.
"""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from explorer_service.errors import EngineLost, InvalidReply, NoEngine, VersionNotServed, WeightsUnproven
from shared.errors import CannotRollBack, CannotServe, EngineError, LedgerError, TooManySignals, TooManyTargets
from shared.log import StageLogger

log = StageLogger("explorer")
RETRY_AFTER_S = 2


class ApiError(Exception):
    """An error response."""

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

    def content(self) -> dict[str, object]:
        """Return the error object that callers get."""
        return {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.content()})

    def response(self) -> Response:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(self.body(), self.status, headers, media_type="application/json")


def as_api_error(error: Exception) -> ApiError | None:
    """Return the error response for an exception; None for a bug, which is logged with its traceback."""
    match error:
        case ApiError():
            return error
        case LedgerError():
            return unavailable("the ledger cannot store or read this now; try again", "ledger_unavailable")
        case RecursionError():
            return bad_request("the body is nested too deeply")
        case TooManySignals():
            return ApiError(400, str(error), code="too_many_signals")
        case TooManyTargets():
            return ApiError(400, str(error), code="too_many_targets")
        case CannotRollBack():
            return ApiError(409, str(error), param="to", code="cannot_roll_back")
        case CannotServe():
            return ApiError(409, str(error), code="cannot_serve")
        case NoEngine():
            return unavailable(str(error), error.code)
        case EngineLost():
            log.warning("an engine did not complete a request", reason=str(error))  # only the log names its address
            return unavailable(f"engine {error.engine} did not complete the request; try again", "engine_lost")
        case WeightsUnproven():
            return unavailable("the engine's weights were not proven; try again", "weights_unproven")
        case InvalidReply():
            return unavailable(str(error), "engine_reply")
        case EngineError():
            log.warning("an engine did not serve a request", reason=str(error))
            return unavailable("an engine did not serve the request; try again", "engine_error")
        case VersionNotServed():
            return ApiError(404, str(error), kind="NotFoundError", param="model", code="version_not_served")
    return None


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def unavailable(message: str, code: str) -> ApiError:
    """Return a 503 with Retry-After: the request is valid, and may be sent again."""
    return ApiError(503, message, kind="service_unavailable", code=code, retry_after_s=RETRY_AFTER_S)


def internal_error() -> ApiError:
    """Return the response to a request that failed because of a bug."""
    return ApiError(500, "internal server error; the explorer's log has the details", kind="server_error")
