"""Selects the production calls that are replayed for training: strategies, and marks that a caller sets."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from flywheel.errors import ConfigError
from flywheel.workflow import Caller


@dataclass(frozen=True)
class Mark:
    """A caller's mark for the following calls in its context."""

    labels: tuple[str, ...]
    task_id: str | None
    metadata: Mapping[str, Any]
    at_s: float  # time.monotonic()


_mark: ContextVar[Mark | None] = ContextVar("flywheel_mark", default=None)


def current_mark() -> Mark | None:
    """Return the mark of this context."""
    return _mark.get()


def mark(*labels: str, task_id: str | None = None, **metadata: Any) -> None:
    """Mark the following calls in this context (this task or thread) for `Marked`.

    >>> mark("high-quality", task_id="t-1")
    >>> current_mark().labels
    ('high-quality',)
    """
    _mark.set(Mark(labels, task_id, metadata, time.monotonic()))


@contextmanager
def marked(*labels: str, task_id: str | None = None, **metadata: Any) -> Iterator[None]:
    """Mark the calls inside a block.

    >>> with marked("refund"):
    ...     current_mark().labels
    ('refund',)
    """
    token = _mark.set(Mark(labels, task_id, metadata, time.monotonic()))
    try:
        yield
    finally:
        _mark.reset(token)


@dataclass(frozen=True)
class Call:
    """One call of a watched agent. reply: None for a strategy that decides before the reply. at_s: time.monotonic().

    >>> Call({"user": "u1"}).request["user"]
    'u1'
    """

    request: Any
    reply: Any = None
    mark: Mark | None = None
    at_s: float = field(default_factory=time.monotonic, compare=False)


@dataclass(frozen=True)
class Selected:
    """The reason to replay a call; task_id names its task, or None for a new one.

    >>> Selected("sampling-rate", labels=("sampled",)).reason
    'sampling-rate'
    """

    reason: str
    labels: tuple[str, ...] = ()
    task_id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Selection:
    """A strategy; `|`, `&` and `~` combine them. `early` ones decide before the reply, so that fewer calls are copied.

    >>> (SamplingRate(0.0) | ~SamplingRate(0.0)).pick(Call("hello")).reason
    'not'
    """

    early = True

    def pick(self, call: Call) -> Selected | None:
        """Return the decision of an early strategy."""
        raise NotImplementedError

    async def decide(self, call: Call) -> Selected | None:
        """Return the decision."""
        return self.pick(call)

    def in_threads(self, threads: Executor) -> Selection:
        """Return the same strategy, whose sync functions run in these threads."""
        return self

    def __or__(self, other: Selection | Chooser) -> Selection:
        return _Or(self, as_selection(other))

    def __and__(self, other: Selection | Chooser) -> Selection:
        return _And(self, as_selection(other))

    def __invert__(self) -> Selection:
        return _Not(self)


Chooser = Callable[[Call], object]  # Selected, a truth value or None, or an awaitable of them


def as_selection(strategy: Selection | Chooser) -> Selection:
    """Convert a function of a Call, sync or async, that returns Selected, a truth value or None to a strategy."""
    return strategy if isinstance(strategy, Selection) else _Function(strategy)


class SamplingRate(Selection):
    """Selects a share of the calls. by: a function of the Call; calls with equal values are treated alike.

    >>> SamplingRate(1.0).pick(Call("hello")).reason
    'sampling-rate'
    >>> SamplingRate(2.0)
    Traceback (most recent call last):
    flywheel.errors.ConfigError: p=2.0: give a share from 0 to 1
    """

    def __init__(self, p: float, *, seed: int | None = None, by: Callable[[Call], object] | None = None) -> None:
        if not 0 <= p <= 1:
            raise ConfigError(f"p={p}: give a share from 0 to 1")
        self.p = p
        self._by = by
        self._seed = seed
        self._random = random.Random(seed)

    def pick(self, call: Call) -> Selected | None:
        """Decide at random, or by a hash of the value of `by`."""
        if self._by is None:
            chosen = self._random.random() < self.p
        else:
            digest = hashlib.sha256(f"{self._seed}/{self._by(call)}".encode()).digest()
            chosen = int.from_bytes(digest[:7], "big") < self.p * 2**56
        return Selected("sampling-rate", ("sampled",)) if chosen else None


class Marked(Selection):
    """Selects calls that were marked at most ttl_s before.

    >>> with marked("refund", task_id="t-1"):
    ...     Marked().pick(Call("hello", mark=current_mark())).task_id
    't-1'
    """

    def __init__(self, ttl_s: float = 60.0) -> None:
        self.ttl_s = ttl_s

    def pick(self, call: Call) -> Selected | None:
        """Decide by the mark of the call."""
        found = call.mark
        if found is None or call.at_s - found.at_s > self.ttl_s:
            return None
        return Selected("marked", found.labels, found.task_id, found.metadata)


class _Or(Selection):
    def __init__(self, first: Selection, second: Selection) -> None:
        self._first, self._second = first, second
        self.early = first.early and second.early

    def in_threads(self, threads: Executor) -> Selection:
        return _Or(self._first.in_threads(threads), self._second.in_threads(threads))

    def pick(self, call: Call) -> Selected | None:
        return self._first.pick(call) or self._second.pick(call)

    async def decide(self, call: Call) -> Selected | None:
        return await self._first.decide(call) or await self._second.decide(call)


class _And(Selection):
    def __init__(self, first: Selection, second: Selection) -> None:
        self._first, self._second = first, second
        self.early = first.early and second.early

    def in_threads(self, threads: Executor) -> Selection:
        return _And(self._first.in_threads(threads), self._second.in_threads(threads))

    def pick(self, call: Call) -> Selected | None:
        return _both(self._first.pick(call), self._second.pick(call))

    async def decide(self, call: Call) -> Selected | None:
        return _both(await self._first.decide(call), await self._second.decide(call))


def _both(first: Selected | None, second: Selected | None) -> Selected | None:
    if first is None or second is None:
        return None
    return Selected(
        f"{first.reason} and {second.reason}",
        first.labels + second.labels,
        first.task_id or second.task_id,
        {**first.metadata, **second.metadata},
    )


class _Not(Selection):
    def __init__(self, inner: Selection) -> None:
        self._inner = inner
        self.early = inner.early

    def in_threads(self, threads: Executor) -> Selection:
        return _Not(self._inner.in_threads(threads))

    def pick(self, call: Call) -> Selected | None:
        return Selected("not") if self._inner.pick(call) is None else None

    async def decide(self, call: Call) -> Selected | None:
        return Selected("not") if await self._inner.decide(call) is None else None


class _Function(Selection):
    early = False

    def __init__(self, function: Chooser, threads: Executor | None = None) -> None:
        self._function = function
        self._call = Caller(function, ("call",), threads)

    def in_threads(self, threads: Executor) -> Selection:
        return _Function(self._function, threads)

    async def decide(self, call: Call) -> Selected | None:
        result = await self._call(call)
        if result is None or isinstance(result, Selected):
            return result
        return Selected(getattr(self._function, "__name__", "function")) if result else None
