"""Why a request cannot be served. Without HTTP: only api/errors.py converts these exceptions to answers.

FlywheelError                     shared/errors.py
├── LedgerError                   the database is unavailable or refuses a request
├── EngineError                   an engine is unavailable, or a request to it failed
│   ├── EngineUnavailable         it does not answer
│   │   ├── EngineLost            it did not complete a request
│   │   ├── EngineTimeout         it did not answer in time
│   │   └── EngineDied            it died or did not answer in time during a take-up
│   ├── EngineRefused             it answered an administrative request with an error
│   ├── InvalidReply              its reply is not a chat completion, or answers another request
│   ├── LoadUndone                it did not load a version, and has the previous one again
│   ├── LoadsRefused              it did not load a version, and then not the previous one either
│   ├── NotOwner                  another explorer owns it now
│   ├── OtherWeights              it holds another version than it serves
│   ├── TurnLost                  another engine takes up a version now
│   ├── StageFailed               its machine cannot store a version, or does not see it
│   │   └── NoRoom                it has no room for a version while it has requests of others
│   ├── ProbeMismatch             it computes other logprobs than the trainer
│   ├── AdapterForgotten          it restarted, and lacks an adapter that it had loaded
│   └── WeightsUnproven           it sampled a reply with weights that failed their proof
├── NoEngine                      no engine can serve a chat now; it may be sent again
└── VersionNotServed              the version or model that a caller named is not in service

CallerLeft                        the caller closed its connection; nobody waits for the answer
ApiError                          an error response, for errors of HTTP itself (api/errors.py)
FramingError                      a connection's bytes can no longer be split into requests (api/framing.py)
CannotGroup                       a group of writes failed; only the writer uses it (write_group.py)
"""

from __future__ import annotations

import re

import msgspec

from shared.errors import EngineError, FlywheelError

NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # raised for bytes that are not the expected JSON
_ADDRESS = re.compile(r"https?://[^\s;,)]+")


class EngineUnavailable(EngineError):
    """The engine does not answer, or stopped answering."""


class EngineLost(EngineUnavailable):
    """The engine did not complete a request."""

    def __init__(self, engine: str, reason: str) -> None:
        super().__init__(f"engine {engine} did not complete the request ({reason}); try again")
        self.engine = engine


class EngineTimeout(EngineUnavailable):
    """The engine did not answer in time."""


class EngineDied(EngineUnavailable):
    """The engine died, or did not answer in time, during a take-up."""


class EngineRefused(EngineError):
    """The engine answered an administrative request with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status  # HTTP status


class InvalidReply(EngineError):
    """The engine's reply is not a chat completion, or answers another request."""


class LoadUndone(EngineError):
    """A load failed, and the last good version was loaded again before the engine resumed."""

    def __init__(self, message: str, *, is_technical: bool) -> None:
        """is_technical: the load took too long, so the version may be good."""
        super().__init__(message)
        self.is_technical = is_technical


class LoadsRefused(EngineError):
    """The engine is well, but refused to load a version, and then the last good one: it may hold parts of both."""


class NotOwner(EngineError):
    """Another explorer owns the engine now."""


class OtherWeights(EngineError):
    """The engine holds another version than it serves."""


class TurnLost(EngineError):
    """Another engine takes up a version now; this one is unchanged."""


class StageFailed(EngineError):
    """The engine's machine cannot store a version, or does not see it; the engine continues to serve."""


class NoRoom(StageFailed):
    """The engine is well, and has no room for a version while it has requests of others."""


class ProbeMismatch(EngineError):
    """The engine computes other logprobs than the trainer."""


class AdapterForgotten(EngineError):
    """The engine restarted, and lacks an adapter that it had loaded; its adapters are being loaded again."""


class WeightsUnproven(EngineError):
    """The engine sampled a part of a reply with weights that failed their proof."""


class NoEngine(FlywheelError):
    """No engine can serve this chat now. `code` is the reason: engines_unavailable, engines_busy or overloaded."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class VersionNotServed(FlywheelError):
    """The version or model that a caller named is not in service."""


class CallerLeft(Exception):
    """The caller closed its connection; nobody waits for the answer."""


def without_addresses(reason: str) -> str:
    """Return a reason without the engines' addresses, which only admins may see."""
    return _ADDRESS.sub("(its address)", reason)
