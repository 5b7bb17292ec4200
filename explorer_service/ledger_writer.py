"""The writers of this process: they make all writes to the ledger (samples, feedback, commits, heartbeats, reloads).

A writer's thread owns a connection. Jobs that arrive during a transaction share the next one (group commit), so a busy
explorer needs one fsync for many chats. Each job has its own savepoint: a job that fails is rolled back alone. Callers
get an answer within the writer's timeout, even if the database hangs.
"""

from __future__ import annotations

import asyncio
import queue
import random
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection

from explorer_service.background import Background
from explorer_service.metrics import ExplorerMetrics
from explorer_service.write_group import CannotGroup, Job, Outcome, answer, attempt_each, store_together
from shared.errors import LedgerError
from shared.experience import Sample
from shared.ledger import transitions
from shared.ledger.connect import DedicatedConnection, Ledger
from shared.ledger.failures import is_conflict, is_lock_timeout
from shared.log import StageLogger

T = TypeVar("T")
log = StageLogger("record")
_MAX_GROUP = 256
_MAX_REPEATS = 5  # of a job after a deadlock
_PAUSE_S = 0.02  # longest pause before the first repeat; it doubles before each further one


class LedgerWriter:
    """`await write(work)` returns once `work`'s changes are durable. Create it in the event loop that awaits it."""

    def __init__(
        self,
        ledger: Ledger,
        metrics: ExplorerMetrics,
        background: Background,
        timeout_s: float = 4.0,
        name: str = "ledger-writer",
    ) -> None:
        """timeout_s: after this time, a write raises LedgerError."""
        self._connection = DedicatedConnection(ledger)
        self._metrics = metrics
        self._timeout_s = timeout_s
        self.is_available = True  # according to the last write, and to timeouts since
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()  # in the order of their deadlines
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = background.start_thread(name, self._run)

    async def stop(self) -> None:
        """Finish the submitted jobs, then end."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction on the writer's thread, and repeat it after a deadlock.

        Returns its result once it is durable. Raises `work`'s exceptions, or LedgerError, with nothing changed; or
        LedgerError after the timeout, and then the change may or may not be stored. Cancellation does not stop `work`.
        """
        result: T = await self._submit(work, [])
        return result

    async def record(self, samples: list[Sample]) -> None:
        """Store samples durably. Raises LedgerError. Cancellation takes effect after the write.

        samples: none if the chat is not recorded, or its stream contained an error.
        """
        if not samples:
            return
        stored = self._submit(lambda connection: transitions.record(connection, samples), samples)
        try:
            await asyncio.shield(stored)
        except asyncio.CancelledError:  # feedback waits for the end of a left stream, and then needs its row
            await asyncio.wait([stored])
            raise

    def _submit(self, work: Callable[[Connection], Any], samples: list[Sample]) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        job = Job(future, work, samples, self._loop.time() + self._timeout_s)
        waiting = self._waiting
        while waiting and waiting[0].future.done():
            waiting.popleft()
        waiting.append(job)
        if self._timer is None:
            self._timer = self._loop.call_at(job.deadline, self._expire)
        self._jobs.put(job)
        if not self._thread.is_alive():  # it died, and cannot answer
            self._refuse_all()
        return future

    def _expire(self) -> None:
        """Fail the jobs whose deadline has passed. All jobs share one timer, which runs only while a job waits."""
        waiting, now = self._waiting, self._loop.time()
        while waiting and (waiting[0].future.done() or waiting[0].deadline <= now):
            job = waiting.popleft()
            if not job.future.done():
                job.timed_out = True
                self._note_unavailable(f"no answer within {self._timeout_s:g} s")
                job.future.set_exception(
                    LedgerError(f"the database has not answered within {self._timeout_s:g} s; is it up and unlocked?")
                )
        self._timer = self._loop.call_at(waiting[0].deadline, self._expire) if waiting else None

    def _note_unavailable(self, reason: str) -> None:
        if self.is_available:  # logged once per outage
            log.error("the ledger cannot be written; callers get 503", reason=reason)
        self.is_available = False

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._connection.close()
            self._refuse_all()

    def _refuse_all(self) -> None:
        """Fail the jobs left in the queue after the writer has ended."""
        error: BaseException = LedgerError("the ledger's writer has ended; this process stops")
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                outcome: Outcome = (job, None, error)
                self._loop.call_soon_threadsafe(answer, [outcome])

    def _serve(self) -> None:
        while True:
            first = self._jobs.get()
            if first is None:
                return
            group, stopping = [first], False
            while len(group) < _MAX_GROUP and not stopping:
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if job is None:
                    stopping = True
                else:
                    group.append(job)
            if group := [job for job in group if not job.timed_out]:
                self._commit_group(group)
            if stopping:
                return

    def _commit_group(self, group: list[Job]) -> None:
        """Run the jobs together in one transaction, or else one by one in another; then answer them."""
        started = time.perf_counter()
        try:
            outcomes = self._try(group)
        except LedgerError as error:
            self._note_unavailable(str(error))
            outcomes = [(job, None, error) for job in group]
        except Exception as error:  # the thread's boundary: callers get the error, and the thread continues
            log.exception("jobs were not stored", jobs=len(group))
            outcomes = [(job, None, error) for job in group]
        else:
            if not self.is_available:
                log.info("the ledger can be written again")
            self.is_available = True
        self._metrics.record_commit.observe(time.perf_counter() - started)
        stored = [sample for job, _, failure in outcomes if failure is None for sample in job.samples]
        self._metrics.count_recorded(len(stored), sum(sample.quarantine is not None for sample in stored))
        self._loop.call_soon_threadsafe(answer, outcomes)  # one call for all: each call wakes the loop

    def _try(self, group: list[Job]) -> list[Outcome]:
        is_locked = False
        if all(job.samples for job in group):
            try:
                return self._commit(group, store_together)
            except CannotGroup as error:
                is_locked = is_lock_timeout(error.__cause__)
                if is_locked and len(group) == 1:
                    return [(group[0], None, error.__cause__)]
        return [self._repeat(outcome) for outcome in self._commit(group, partial(attempt_each, is_locked))]

    def _repeat(self, outcome: Outcome) -> Outcome:
        """Repeat a job that failed by a deadlock, in its own transactions; the rest of its group is stored already."""
        job, pause_s = outcome[0], _PAUSE_S
        for _ in range(_MAX_REPEATS):
            if not is_conflict(outcome[2]):
                break
            time.sleep(random.uniform(0, pause_s))
            pause_s *= 2
            try:
                (outcome,) = self._commit([job], partial(attempt_each, False))
            except LedgerError as error:
                return job, None, error
        return outcome

    def _commit(self, group: list[Job], run: Callable[[list[Job], Connection], list[Outcome]]) -> list[Outcome]:
        return self._connection.write(partial(run, group))


class WriteInParts:
    """A long write, as a series of short transactions that leaves two thirds of the time to other writers."""

    def __init__(self, writer: LedgerWriter) -> None:
        self._writer = writer
        self._pause_s = 0.0

    async def write(self, part: Callable[[Connection], T]) -> T:
        """Wait, unless this is the first part, and write this one. Raises like LedgerWriter.write."""
        await asyncio.sleep(self._pause_s)
        began = time.monotonic()
        try:
            return await self._writer.write(part)
        finally:
            self._pause_s = 2 * (time.monotonic() - began)
