"""Stage 2, record: samples become rows, durable before the caller has its answer.

One thread owns all writing of this process. What arrives while a transaction is being made durable goes into the next
one together (group commit), so that a busy explorer pays one fsync for many chats. Each job has its own savepoint: one
that fails undoes itself alone.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, OperationalError

from shared.errors import LedgerError
from shared.experience import Sample
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.log import StageLogger
from shared.metrics import ExplorerMetrics

T = TypeVar("T")
log = StageLogger("record")
_MAX_GROUP = 256


class _Job:
    __slots__ = ("future", "samples", "work")

    def __init__(self, work: Callable[[Connection], Any], samples: list[Sample] | None = None) -> None:
        self.work = work
        self.samples = samples  # of a job that does nothing but store them: such jobs are done together
        self.future: Future[Any] = Future()


class Recorder:
    """The process's one writer. `await write(work)` returns once `work`'s changes are durable."""

    def __init__(self, ledger: Ledger, metrics: ExplorerMetrics) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self._away = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """Finish what was handed in, then end."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction on the writer's thread.

        Returns its result once it is durable. Raises what `work` raised, or LedgerError, with nothing changed.
        """
        result: T = await self._hand_in(_Job(work))
        return result

    async def _hand_in(self, job: _Job) -> Any:
        self._jobs.put(job)
        return await asyncio.wrap_future(job.future)

    async def record(self, samples: list[Sample]) -> None:
        """Store samples durably. Raises LedgerError."""
        await self._hand_in(_Job(lambda connection: transitions.record(connection, samples), samples))
        quarantined = sum(sample.quarantine is not None for sample in samples)
        self._metrics.count_recorded(len(samples), quarantined)

    def _run(self) -> None:
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
            self._commit_group(group)
            if stopping:
                return

    def _commit_group(self, group: list[_Job]) -> None:
        """Run the jobs in one transaction and answer each once it is durable."""
        outcomes: list[tuple[_Job, Any, BaseException | None]] = []
        started = time.perf_counter()
        try:
            with self._ledger.write() as connection:
                outcomes = _attempt_all(group, connection)
        except LedgerError as error:
            if not self._away:  # said once, until it is back
                log.error("the ledger does not store; callers get 503", reason=str(error))
            self._away = True
            outcomes = [(job, None, error) for job in group]
        except (
            Exception
        ) as error:  # the boundary of this thread: every caller must hear of it, and the thread must live
            log.exception("not stored", jobs=len(group))
            outcomes = [(job, None, error) for job in group]
        else:
            if self._away:
                log.info("the ledger stores again")
            self._away = False
        self._metrics.record_commit.observe(time.perf_counter() - started)
        for job, result, failure in outcomes:
            if job.future.cancelled():
                continue
            if failure is not None:
                job.future.set_exception(failure)
            else:
                job.future.set_result(result)


def _attempt_all(group: list[_Job], connection: Connection) -> list[tuple[_Job, Any, BaseException | None]]:
    """All samples in one statement, then the other jobs; one by one what cannot be done together."""
    recording = [job for job in group if job.samples is not None]
    outcomes: list[tuple[_Job, Any, BaseException | None]] = []
    if len(recording) > 1:
        samples = [sample for job in recording for sample in job.samples or ()]
        together = _attempt(_Job(lambda connection: transitions.record(connection, samples)), connection)
        if together[2] is None:
            outcomes = [(job, None, None) for job in recording]
    if not outcomes:
        outcomes = [_attempt(job, connection) for job in recording]
    return outcomes + [_attempt(job, connection) for job in group if job.samples is None]


def _attempt(job: _Job, connection: Connection) -> tuple[_Job, Any, BaseException | None]:
    savepoint = connection.begin_nested()
    try:
        result = job.work(connection)
        savepoint.commit()
    except OperationalError:  # the database itself: the whole group fails, as LedgerError
        raise
    except Exception as error:  # noqa: BLE001 — the caller's: it goes back to whoever awaits the job
        if savepoint.is_active:
            savepoint.rollback()
        if isinstance(error, DBAPIError):
            cause = str(error.orig).strip().split("\n")[0]
            return job, None, LedgerError(f"the database refuses this ({cause})")
        return job, None, error
    return job, result, None
