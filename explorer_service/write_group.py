"""The jobs of one transaction of a writer: chats are stored together, every other job has its own savepoint.

A job that fails is rolled back alone. If the database itself fails, all jobs fail.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from shared.errors import LedgerError
from shared.experience import Sample
from shared.ledger import transitions
from shared.ledger.connect import wait_no_more
from shared.ledger.failures import is_lock_timeout, is_of_the_database
from shared.log import StageLogger

log = StageLogger("record")


@dataclass(slots=True, eq=False)
class Job:
    """A write that a caller waits for."""

    future: asyncio.Future[Any]
    work: Callable[[Connection], Any]
    samples: list[Sample]  # of a job that only stores samples: such jobs are run together
    deadline: float  # by the event loop's clock
    timed_out: bool = False  # its caller got an error already


Outcome = tuple[Job, Any, BaseException | None]  # the job, and its result or error


class CannotGroup(Exception):
    """The jobs of a group cannot be run together."""


def store_together(group: list[Job], connection: Connection) -> list[Outcome]:
    """Store all samples of a group of chats, the usual case, at once and without savepoints. Raises CannotGroup."""
    try:
        transitions.record(connection, [sample for job in group for sample in job.samples])
    except Exception as error:
        _raise_if_of_the_database(error)
        raise CannotGroup from error
    return [(job, None, None) for job in group]


def attempt_each(is_locked: bool, group: list[Job], connection: Connection) -> list[Outcome]:
    """Run the chats in one savepoint if possible, and every other job in its own, so that a failed one is undone alone.

    is_locked: another transaction holds a lock that one of them needs, and they have waited for it already.
    """
    if is_locked:
        wait_no_more(connection)
    chats = [job for job in group if job.samples]
    done: list[Outcome] = []
    if len(chats) > 1 and not is_locked:
        with contextlib.suppress(CannotGroup), connection.begin_nested():
            done = store_together(chats, connection)
    return done + [_attempt(job, connection) for job in group if not (done and job.samples)]


def _attempt(job: Job, connection: Connection) -> Outcome:
    savepoint = connection.begin_nested()
    try:
        result = job.work(connection)
        savepoint.commit()
    except Exception as error:  # noqa: BLE001 — passed to the caller that awaits the job
        _raise_if_of_the_database(error)
        if savepoint.is_active:
            savepoint.rollback()
        if is_lock_timeout(error):  # each following job would wait as long
            wait_no_more(connection)
        return job, None, error
    return job, result, None


def _raise_if_of_the_database(error: Exception) -> None:
    """Raise the error if the database itself failed: then the whole group fails, with LedgerError."""
    if isinstance(error, DBAPIError) and is_of_the_database(error):
        raise error


def _public_error(error: BaseException) -> BaseException:
    """Return the error for the caller that awaits a failed job."""
    if isinstance(error, DBAPIError):
        cause = str(error.orig).strip().split("\n")[0]
        log.warning("the database refuses a write", reason=cause)
        refusal = LedgerError(f"the database refuses this ({cause})")
        refusal.__cause__ = error
        return refusal
    return error


def answer(outcomes: list[Outcome]) -> None:
    """Set the results of the jobs' futures. Runs in the event loop."""
    for job, result, failure in outcomes:
        if job.future.done():  # cancelled, or timed out
            continue
        if failure is not None:
            job.future.set_exception(_public_error(failure))
        else:
            job.future.set_result(result)
