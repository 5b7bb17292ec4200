"""Stage 2, record: samples become rows, durable before the caller has its answer.

One thread owns all writing of this process. What arrives while a transaction is being made durable goes into the next
one together (group commit), so that a busy explorer pays one fsync for many chats. Each job has its own savepoint: one
that fails undoes itself alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, OperationalError

from explorer_service.errors import unavailable
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

    def __init__(self, future: asyncio.Future[Any], work: Callable[[Connection], Any], samples: list[Sample]) -> None:
        self.future = future
        self.work = work
        self.samples = samples  # of a job that does nothing but store them: such jobs are done together


_Outcome = tuple[_Job, Any, BaseException | None]


class Recorder:
    """The process's one writer. `await write(work)` returns once `work`'s changes are durable."""

    def __init__(self, ledger: Ledger, metrics: ExplorerMetrics) -> None:
        self._connection = ledger.keep()
        self._metrics = metrics
        self._away = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)

    def start(self) -> None:
        """Begin; answers come in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Finish what was handed in, then end."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction on the writer's thread.

        Returns its result once it is durable. Raises what `work` raised, or LedgerError, with nothing changed. Who is
        cancelled while waiting does not undo it.
        """
        result: T = await self._hand_in(work, [])
        return result

    def _hand_in(self, work: Callable[[Connection], Any], samples: list[Sample]) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        self._jobs.put(_Job(future, work, samples))
        return future

    async def record(self, samples: list[Sample]) -> None:
        """Store samples durably. Raises LedgerError. Who is cancelled while waiting does not undo it."""
        await self._hand_in(lambda connection: transitions.record(connection, samples), samples)

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._connection.close()

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
            self._commit_group(group)
            if stopping:
                return

    def _commit_group(self, group: list[_Job]) -> None:
        """Run the jobs in one transaction, or those that cannot be run together one by one in another; then answer."""
        started = time.perf_counter()
        try:
            outcomes = self._try(group)
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
        stored = [sample for job, _, failure in outcomes if failure is None for sample in job.samples]
        self._metrics.count_recorded(len(stored), sum(sample.quarantine is not None for sample in stored))
        self._loop.call_soon_threadsafe(_answer, outcomes)  # once for all: each call wakes the loop

    def _try(self, group: list[_Job]) -> list[_Outcome]:
        if all(job.samples for job in group):
            with contextlib.suppress(_Apart):
                return self._commit(group, _store_together)
        try:
            return self._commit(group, _attempt_each)
        except _Undone as undone:
            return [undone.outcome]

    def _commit(self, group: list[_Job], run: Callable[[list[_Job], Connection], list[_Outcome]]) -> list[_Outcome]:
        return self._connection.write(partial(run, group))


async def record_or_fail(samples: list[Sample], recorder: Recorder) -> None:
    """Make samples durable. A caller who goes away meanwhile does not undo it. Raises ApiError 503."""
    if not samples:  # not to be stored, refused by the engine, or a stream that held an error and no choice
        return
    try:
        await recorder.record(samples)
    except LedgerError as exc:
        raise unavailable(f"the reply could not be recorded: {exc}", "not_recorded") from exc


class _Apart(Exception):
    """The jobs of a group cannot be done together."""


class _Undone(Exception):
    """A job that was alone in its transaction failed, and the transaction with it."""

    def __init__(self, outcome: _Outcome) -> None:
        self.outcome = outcome


def _store_together(group: list[_Job], connection: Connection) -> list[_Outcome]:
    """Chats only, as nearly always: all their samples at once, with no savepoint."""
    try:
        transitions.record(connection, [sample for job in group for sample in job.samples])
    except OperationalError:
        raise
    except Exception as error:
        raise _Apart from error
    return [(job, None, None) for job in group]


def _attempt_each(group: list[_Job], connection: Connection) -> list[_Outcome]:
    """Chats in one savepoint if they can be, every other job in its own: one that fails undoes itself alone."""
    if len(group) == 1:
        return [_attempt_alone(group[0], connection)]
    chats = [job for job in group if job.samples]
    done: list[_Outcome] = []
    if len(chats) > 1:
        with contextlib.suppress(_Apart), connection.begin_nested():
            done = _store_together(chats, connection)
    return done + [_attempt(job, connection) for job in group if not (done and job.samples)]


def _attempt_alone(job: _Job, connection: Connection) -> _Outcome:
    try:
        return job, job.work(connection), None
    except OperationalError:  # the database itself: as LedgerError
        raise
    except Exception as error:
        raise _Undone((job, None, _told(error))) from error


def _attempt(job: _Job, connection: Connection) -> _Outcome:
    savepoint = connection.begin_nested()
    try:
        result = job.work(connection)
        savepoint.commit()
    except OperationalError:  # the database itself: the whole group fails, as LedgerError
        raise
    except Exception as error:  # noqa: BLE001 — the caller's: it goes back to whoever awaits the job
        if savepoint.is_active:
            savepoint.rollback()
        return job, None, _told(error)
    return job, result, None


def _told(error: Exception) -> Exception:
    """What whoever awaits the job hears of its failure."""
    if isinstance(error, DBAPIError):
        cause = str(error.orig).strip().split("\n")[0]
        return LedgerError(f"the database refuses this ({cause})")
    return error


def _answer(outcomes: list[_Outcome]) -> None:
    for job, result, failure in outcomes:
        if job.future.done():  # cancelled: nobody waits for it
            continue
        if failure is not None:
            job.future.set_exception(failure)
        else:
            job.future.set_result(result)
