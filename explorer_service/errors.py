"""Why a request cannot be served. Nothing here knows HTTP: api/errors.py turns these into answers, in one place.

FlywheelError                     shared/errors.py
├── LedgerError                   the database is unavailable or refuses
├── EngineError                   an engine is unavailable, or did not do what was asked
│   ├── EngineUnavailable         nothing answers there, or it stopped answering
│   │   ├── EngineLost            it broke off while it had a request of ours
│   │   ├── EngineTimeout         it did not answer in time
│   │   └── EngineDied            it did one of both while it took up a version
│   ├── EngineRefused             it answered an administrative request with an error
│   ├── InvalidReply              its reply to a chat is no completion, or not the one asked for
│   ├── LoadUndone                it did not load a version, and has the one from before back
│   ├── NotOwner                  another explorer moves it now
│   ├── TurnLost                  another engine takes up a version now
│   ├── StageFailed               it cannot hold a version on its own disk, or does not see it
│   ├── ProbeMismatch             it computes other logprobs than the trainer did
│   ├── AdapterForgotten          it does not know an adapter that it had loaded, for it has started anew
│   └── WeightsUnproven           it sampled a reply by weights that failed their proof
├── NoEngine                      no engine can take this chat; it may be sent again
└── VersionNotServed              the version or model that a caller named is not in service

CallerLeft                        the caller closed its connection; nobody waits for the answer
ApiError                          an answer that is an error, for what only HTTP knows (api/errors.py)
FramingError                      a connection can no longer be read as requests (api/framing.py)
CannotGroup, JobFailed            how a group of writes failed; only the writer meets them (write_group.py)
"""

from __future__ import annotations

import re

import msgspec

from shared.errors import EngineError, FlywheelError

NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # bytes that are not the JSON they should be
_ADDRESS = re.compile(r"https?://[^\s;,)]+")


class EngineUnavailable(EngineError):
    """Nothing answers there, or it stopped answering."""


class EngineLost(EngineUnavailable):
    """The engine broke off while it had a request of ours."""

    def __init__(self, engine: str, reason: str) -> None:
        super().__init__(f"engine {engine} broke off ({reason}); try again")
        self.engine = engine


class EngineTimeout(EngineUnavailable):
    """The engine did not answer in time."""


class EngineDied(EngineUnavailable):
    """The engine died, or did not answer in time, while it took up a version."""


class EngineRefused(EngineError):
    """The engine answered an administrative request with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status  # of HTTP


class InvalidReply(EngineError):
    """The engine's reply to a chat is no completion, or not the one that was asked for."""


class LoadUndone(EngineError):
    """A load failed, and the last good version was put back in before the engine resumed."""

    def __init__(self, message: str, *, is_technical: bool) -> None:
        """is_technical: it took too long, which may be nobody's fault."""
        super().__init__(message)
        self.is_technical = is_technical


class NotOwner(EngineError):
    """Another explorer owns the engine now."""


class TurnLost(EngineError):
    """Another engine takes up a version now; nothing was done to this one."""


class StageFailed(EngineError):
    """The engine's machine cannot hold a version on its own disk, or does not see it; the engine serves on."""


class ProbeMismatch(EngineError):
    """The engine answers, with other logprobs than the trainer computed."""


class AdapterForgotten(EngineError):
    """The engine does not know the adapter that it had loaded: it has started anew, and is given its set back."""


class WeightsUnproven(EngineError):
    """The engine went on with a reply under weights that then failed their proof."""


class NoEngine(FlywheelError):
    """No engine can take this chat now. `code` says why: engines_unavailable, engines_busy or overloaded."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class VersionNotServed(FlywheelError):
    """The version or model that a caller named is not in service."""


class CallerLeft(Exception):
    """The caller closed its connection; nobody waits for the answer."""


def without_addresses(reason: str) -> str:
    """A reason as callers may read it: where engines are is known to admins alone."""
    return _ADDRESS.sub("(its address)", reason)
