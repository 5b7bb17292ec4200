"""The pace of learn: no run is started while training is behind, or no trainer is alive.

A run that starts now is trained on after all waiting rows, so the rows that open runs will produce count, too. A run is
open until its group is committed. The expected number of its rows is the mean over the last committed runs; the
explorer reports with each commit how many rows became READY, which includes all choices of a reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from flywheel.errors import Away, NotTraining, Unreachable

if TYPE_CHECKING:
    from flywheel.async_client import AsyncClient
    from flywheel.results import Committed, Status

T = TypeVar("T")
log = logging.getLogger("flywheel")
DEFAULT_READY_ROWS = 1024
_ROWS_OF_FIRST_RUNS = 8.0  # assumed rows of a run before the first commit: otherwise at_once runs would start
_GROUPS = 64  # number of last commits in the mean
_HELD_POLL_S = (0.03, 0.2)  # while starts are delayed: a trainer must not run out of rows
_POLL_SHARE = 0.1  # of that time, at most this share is spent on polls
_QUIET_S = 3.0  # how long a call may take before a line of the log says so
LAST_LOOK_S = 2.0  # how long a call for the version may take once work is stopping


class Pacer:
    """Polls /status once in poll_s, and delays starts while READY and expected rows exceed the bound.

    max_ready_rows: None: two batches of the trainer, or 1024 if the explorer reports no batch size. Without a bound,
    the oldest rows of a full ledger are trained on first, and half of all rows are discarded as stale.
    """

    def __init__(
        self,
        client: AsyncClient,
        max_ready_rows: int | None,
        require_trainer: bool,
        *,
        poll_s: float = 1.0,
        patience_s: float = 60.0,
        engine_patience_s: float = 600.0,
    ) -> None:
        self._client = client
        self._bound = max_ready_rows
        self._require_trainer = require_trainer
        self._poll_s = poll_s
        self._patience_s = patience_s
        self._engine_patience_s = engine_patience_s
        self._asking = asyncio.Lock()
        self._asked_at = float("-inf")
        self._missing_since: float | None = None  # time.monotonic() of the first poll without a training trainer
        self.status: Status | None = None
        self.waited_s = 0.0
        self._ready = 0  # rows, as the explorer last reported
        self._open = 0  # runs that have started and are not committed
        self._groups: deque[tuple[int, int]] = deque(maxlen=_GROUPS)  # number of runs, and of their rows
        self._changed = asyncio.Event()
        self._is_warned = self._is_noted = False
        self._held_poll_s = _HELD_POLL_S[1]

    async def unless_stopped(self, stopping: asyncio.Event, call: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of a call to the explorer, or None if work is stopping first, which cancels the call."""
        if stopping.is_set():
            call.close()
            return None
        calling, stop = asyncio.ensure_future(call), asyncio.ensure_future(stopping.wait())
        try:
            done, _ = await asyncio.wait((calling, stop), timeout=_QUIET_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self._note_no_answer()
                await asyncio.wait((calling, stop), return_when=asyncio.FIRST_COMPLETED)
            return calling.result() if calling.done() else None
        finally:
            stop.cancel()
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)

    def _note_no_answer(self) -> None:
        """Log it once, until the explorer answers."""
        if not self._is_noted:
            self._is_noted, explorer = True, self._client.explorer
            log.warning("no answer from %s yet; trying for up to %g s", explorer.shown_url, explorer.retry_s)

    def starts(self) -> None:
        """Count the start of a run."""
        self._open += 1

    def committed(self, runs: int, rows: int, said: Committed) -> None:
        """Count committed runs. rows: replies that this process saw; said: the explorer's answer."""
        self._open -= runs
        self._ready = said.ready
        self._changed.set()
        rows = max(rows, said.committed)
        if runs and rows:  # no runs: a group of an earlier start; no rows: all of them failed
            self._groups.append((runs, rows))

    def _has_room(self, runs: int) -> bool:
        if self._ready > self.bound:
            return False
        size = self.status.batch_size if self.status is not None else None
        if size is None and self._open == 0:
            return True
        ended, rows = (sum(column) for column in zip(*self._groups, strict=True)) if self._groups else (0, 0)
        rows_of_run = rows / ended if ended else _ROWS_OF_FIRST_RUNS
        waiting = self._ready + self._open * rows_of_run
        return waiting <= max(size or 0, self.bound - (runs - 1) * rows_of_run)  # with less, a trainer would wait

    @property
    def bound(self) -> int:
        """READY rows above which no run is started."""
        if self._bound is not None:
            return self._bound
        size = self.status.batch_size if self.status is not None else None
        return 2 * size if size else DEFAULT_READY_ROWS

    async def look(self, stopping: asyncio.Event, max_age_s: float = math.inf) -> Status | None:
        """Return the status, polled again if it is older than poll_s; the last known one if work is stopping first.

        Raises NotTraining, Away and Unreachable.
        """
        async with self._asking:  # runs that wait for an engine share one request
            if self.status is None or time.monotonic() - self._asked_at >= min(max_age_s, self._poll_s):
                await self._ask(stopping)
            return self.status

    async def _ask(self, stopping: asyncio.Event) -> None:
        began = time.monotonic()
        found = await self.unless_stopped(stopping, self._client.status())
        if found is None:
            return
        self.status, self._is_noted = found, False
        self._held_poll_s = min(max((time.monotonic() - began) / _POLL_SHARE, _HELD_POLL_S[0]), _HELD_POLL_S[1])
        self._asked_at, self._ready = time.monotonic(), self.status.ready
        self._warn(self.status.batch_size)
        if self.status.is_training and self.status.held is None:
            self._missing_since = None
        else:
            self._require_patience(self.status.held)

    def _warn(self, batch_size: int | None) -> None:
        if self._bound is not None and batch_size is not None and self._bound < batch_size and not self._is_warned:
            self._is_warned = True
            log.warning(
                "max_ready_rows=%d is less than a batch of the trainer, %d rows: where trainer.batch_timeout_s is not "
                "set, learn and the trainer wait for each other; give at least %d",
                self._bound, batch_size, batch_size,
            )  # fmt: skip

    def _require_patience(self, held: str | None) -> None:
        """Raise NotTraining if no trainer has been training for too long."""
        if self._missing_since is None:
            self._missing_since = self._asked_at
        if self._require_trainer and self._asked_at - self._missing_since >= self._patience_s:
            raise NotTraining(self._not_training_message(held))

    def _not_training_message(self, held: str | None) -> str:
        if held is not None:
            return (
                f"the trainer has been held by its breaker for {self._patience_s:g} s: {held}; "
                "call learn again after `flywheel trainer --resume`"
            )
        return (
            f"no trainer has been alive at {self._client.explorer.shown_url} for {self._patience_s:g} s, so nothing "
            "would be learned: start `flywheel up` or `flywheel trainer`, or give require_trainer=False to collect only"
        )

    async def wait(self, stopping: asyncio.Event, runs: int = 1) -> None:
        """Return when a group of this many runs may start, or work is stopping."""
        began, age_s = time.monotonic(), self._poll_s
        while not stopping.is_set():
            await self.until_served(stopping)
            status = await self.look(stopping, age_s)
            age_s = self._held_poll_s
            if status is None or stopping.is_set():
                break
            if status.is_training and self._has_room(runs):
                break
            if not self._require_trainer and (not status.is_training or status.held is not None):
                break
            self._changed.clear()
            await _first_of((stopping, self._changed), min(self._held_poll_s, self._poll_s))
        self.waited_s += time.monotonic() - began

    async def until_served(self, stopping: asyncio.Event) -> None:
        """Return when an engine serves chats, or work is stopping. Raises Away if that takes too long."""
        began = time.monotonic()
        while not stopping.is_set():
            status = await self.look(stopping)
            if stopping.is_set() or (status is not None and status.has_engine):
                return
            if time.monotonic() - began >= self._engine_patience_s:
                raise Away(
                    503,
                    f"no engine of {self._client.explorer.shown_url} has been in service for "
                    f"{self._engine_patience_s:g} s; `flywheel status` says why",
                )
            await _first_of((stopping,), self._poll_s)

    async def until_served_again(self, stopping: asyncio.Event) -> None:
        """The same after a chat that no engine answered, which the explorer may not have reported yet."""
        await _first_of((stopping,), self._poll_s)
        await self.until_served(stopping)

    async def version(
        self, stopping: asyncio.Event, max_age_s: float = math.inf, last_look_s: float = LAST_LOOK_S
    ) -> int | None:
        """Return the version in service, from `look`; the last known one while the explorer is unavailable.

        last_look_s: how long an answer is awaited if work is stopping already.
        """
        if stopping.is_set():
            stopping = asyncio.Event()
            asyncio.get_running_loop().call_later(last_look_s, stopping.set)
        with contextlib.suppress(Away, Unreachable, NotTraining):  # the last one ends starts of runs, by `wait`
            await self.look(stopping, max_age_s)
        return None if self.status is None else self.status.serving


async def _first_of(events: Iterable[asyncio.Event], timeout_s: float) -> None:
    """Wait until one of the events is set, or the timeout."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for one in waits:
        one.cancel()
