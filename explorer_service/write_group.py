"""The jobs of one transaction of a writer: chats are stored together, every other job has its own savepoint.

A job that fails is undone alone, unless it is the database that fails: then all of them do.
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
    """What one caller wants written, and waits for."""

    future: asyncio.Future[Any]
    work: Callable[[Connection], Any]
    samples: list[Sample]  # of a job that does nothing but store them: such jobs are done together
    deadline: float  # of the event loop's clock
    given_up: bool = False  # whoever waited has been told that it failed


Outcome = tuple[Job, Any, BaseException | None]  # its result, or why it failed


class CannotGroup(Exception):
    """The jobs of a group cannot be done together."""


class JobFailed(Exception):
    """A job that was alone in its transaction failed, and the transaction with it."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


def store_together(group: list[Job], connection: Connection) -> list[Outcome]:
    """Chats only, as nearly always: all their samples at once, with no savepoint."""
    try:
        transitions.record(connection, [sample for job in group for sample in job.samples])
    except Exception as error:
        _raise_if_of_the_database(error)
        raise CannotGroup from error
    return [(job, None, None) for job in group]


def attempt_each(is_locked: bool, group: list[Job], connection: Connection) -> list[Outcome]:
    """Chats in one savepoint if they can be, every other job in its own: one that fails undoes itself alone.

    is_locked: another transaction holds what one of them wants, and they have waited for it already.
    """
    if len(group) == 1:
        return [_attempt_alone(group[0], connection)]
    if is_locked:
        wait_no_more(connection)
    chats = [job for job in group if job.samples]
    done: list[Outcome] = []
    if len(chats) > 1 and not is_locked:
        with contextlib.suppress(CannotGroup), connection.begin_nested():
            done = store_together(chats, connection)
    return done + [_attempt(job, connection) for job in group if not (done and job.samples)]


def _attempt_alone(job: Job, connection: Connection) -> Outcome:
    try:
        return job, job.work(connection), None
    except Exception as error:
        _raise_if_of_the_database(error)
        raise JobFailed((job, None, error)) from error


def _attempt(job: Job, connection: Connection) -> Outcome:
    savepoint = connection.begin_nested()
    try:
        result = job.work(connection)
        savepoint.commit()
    except Exception as error:  # noqa: BLE001 — the caller's: it goes back to whoever awaits the job
        _raise_if_of_the_database(error)
        if savepoint.is_active:
            savepoint.rollback()
        if is_lock_timeout(error):  # the next ones would wait as long, one after the other
            wait_no_more(connection)
        return job, None, error
    return job, result, None


def _raise_if_of_the_database(error: Exception) -> None:
    """Let the whole group fail, as LedgerError, when it is not about this job."""
    if isinstance(error, DBAPIError) and is_of_the_database(error):
        raise error


def _public_error(error: BaseException) -> BaseException:
    """What whoever awaits the job hears of its failure."""
    if isinstance(error, DBAPIError):
        cause = str(error.orig).strip().split("\n")[0]
        log.warning("the database refuses a write", reason=cause)
        refusal = LedgerError(f"the database refuses this ({cause})")
        refusal.__cause__ = error
        return refusal
    return error


def answer(outcomes: list[Outcome]) -> None:
    """Tell whoever waits; in the event loop."""
    for job, result, failure in outcomes:
        if job.future.done():  # cancelled, or given up: nobody waits for it
            continue
        if failure is not None:
            job.future.set_exception(_public_error(failure))
        else:
            job.future.set_result(result)
