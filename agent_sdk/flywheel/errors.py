"""The exceptions of the agent's side, in one tree. Every message names the value, the reason and the remedy.

FlywheelError
├── ConfigError        an argument is wrong (also a ValueError)
├── Unreachable        no response from the explorer
├── Refused            the explorer refused a request: status, code, param
│   ├── NothingKnown   404 for feedback: none of the targets is known; receipts
│   └── Away           408, 429, 502, 503 or 504 until the retries ended: retry_after_s
├── RunError           a run failed
│   ├── NothingRecorded   the explorer recorded no chat of the run
│   ├── TimedOut          a run exceeded its time limit
│   ├── UnsafeTool        a shadow run called a tool that it must not call
│   └── JudgeFailed       a judge gave no usable verdict: there is no reward
├── NothingCompared    no task has a reward of both evaluations: there is no difference
└── LearnError         learning cannot continue
    ├── NotTraining       no trainer is alive, or its breaker has tripped
    ├── TooManyFailures   too many runs failed
    └── JournalMismatch   the folder contains the journal of other work
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class FlywheelError(Exception):
    """Base of all errors that this package raises intentionally. They can be pickled, as process pools require.

    >>> issubclass(Refused, FlywheelError)
    True
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).__new__, (type(self), *self.args), self.__dict__


class ConfigError(FlywheelError, ValueError):
    """An argument is wrong. Raised before anything is sent.

    >>> raise ConfigError("reward=nan: a reward is a finite number")
    Traceback (most recent call last):
    flywheel.errors.ConfigError: reward=nan: a reward is a finite number
    """


class Unreachable(FlywheelError):
    """The explorer sent no response until the retries ended.

    >>> issubclass(Unreachable, FlywheelError)
    True
    """


class Refused(FlywheelError):
    """The explorer refused a request.

    >>> error = Refused(400, "reward must be a number", code="invalid", param="reward")
    >>> error.status, error.code, error.param
    (400, 'invalid', 'reward')
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class NothingKnown(Refused):
    """The explorer knows none of a feedback's targets; `receipts` lists them.

    >>> NothingKnown("none is known", receipts=[{"msg_id": "m", "state": "unknown"}]).receipts[0]["state"]
    'unknown'
    """

    def __init__(self, message: str, *, receipts: list[Mapping[str, Any]]) -> None:
        super().__init__(404, message, code="unknown_target")
        self.receipts = receipts


class Away(Refused):
    """The explorer asked to retry later, or its proxy got no answer from it, until the retries ended.

    `retry_after_s` is the last Retry-After.

    >>> Away(503, "no engine is in service", retry_after_s=2.0).retry_after_s
    2.0
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(status, message, code=code)
        self.retry_after_s = retry_after_s


class RunError(FlywheelError):
    """A run failed.

    >>> issubclass(NothingRecorded, RunError)
    True
    """


class NothingRecorded(RunError):
    """The explorer recorded no chat of a run, so a reward has no target.

    >>> issubclass(NothingRecorded, FlywheelError)
    True
    """


class TimedOut(RunError):
    """A run, or a function that rewards it, exceeded timeout_s. The agent's own, such as TimeoutError, are kept.

    >>> issubclass(TimedOut, RunError)
    True
    """


class UnsafeTool(RunError):
    """A shadow run called a tool that it must not call. The run is not trained on.

    >>> UnsafeTool("refund", "refund is not declared").tool
    'refund'
    """

    def __init__(self, tool: str, message: str) -> None:
        super().__init__(message)
        self.tool = tool


class JudgeFailed(RunError):
    """A judge gave no usable verdict. There is no reward then, not a reward of 0.

    >>> issubclass(JudgeFailed, RunError)
    True
    """


class NothingCompared(FlywheelError):
    """No task has a reward of both evaluations. There is no difference then, not a difference of 0.

    >>> issubclass(NothingCompared, FlywheelError)
    True
    """


class LearnError(FlywheelError):
    """Learning cannot continue.

    >>> issubclass(NotTraining, LearnError)
    True
    """


class NotTraining(LearnError):
    """No trainer is alive, or its breaker has tripped, so that further runs would not be learned from.

    >>> issubclass(NotTraining, FlywheelError)
    True
    """


class TooManyFailures(LearnError):
    """More runs failed than `max_failed_share` allows. The message contains the first tracebacks.

    >>> issubclass(TooManyFailures, LearnError)
    True
    """


class JournalMismatch(LearnError):
    """The folder contains the journal of another workflow, task set, seed or server, or another learn uses it.

    >>> issubclass(JournalMismatch, LearnError)
    True
    """


def describe(error: BaseException) -> str:
    """Format an error's type and message; without a message, the type alone.

    >>> describe(ValueError("no action")), describe(TimeoutError())
    ('ValueError: no action', 'TimeoutError')
    """
    message = str(error)
    return f"{type(error).__name__}: {message}" if message.strip() else type(error).__name__
