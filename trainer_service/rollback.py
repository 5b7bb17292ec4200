"""Detects that an operator has gone back to an earlier version (shared/ledger/transitions/rollback.py).

The trainer then discards its weights and starts again from that version. It checks in each transaction that begins an
update or publishes, so that no later version descends from a rejected one, and before each search for rows, so that a
trainer without rows starts again, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from sqlalchemy import Connection

from shared.errors import RolledBack
from shared.ledger import transitions
from shared.ledger.queries import TrainerRow
from shared.log import StageLogger

log = StageLogger("trainer")
T = TypeVar("T")


class RollbackGuard:
    """Compares the trainer's row with the one that it started from."""

    def __init__(self, trainer: str) -> None:
        self._trainer = trainer
        self._rollbacks = 0
        self.must_start_again = False

    def begin(self, connection: Connection, row: TrainerRow | None, start: int | None) -> None:
        """Check at the start, before the trainer is announced. Raises RolledBack.

        row: the one that it started from. start: the version that it started from; None: a saved state.
        """
        self._rollbacks = 0 if row is None else row.rollbacks
        self.check(connection, start=start, lock=True)

    def check(self, connection: Connection, *, start: int | None = None, lock: bool = False) -> None:
        """Raise RolledBack if an operator has returned this trainer to an earlier version.

        start, lock: see `require_not_rolled_back`.
        """
        transitions.require_not_rolled_back(
            connection, trainer=self._trainer, rollbacks=self._rollbacks, start=start, lock=lock
        )

    def checked(self, work: Callable[[Connection], T]) -> Callable[[Connection], T]:
        """Return `work` with a check before it, in its transaction, which raises RolledBack."""

        def check_and_work(connection: Connection) -> T:
            self.check(connection, lock=True)
            return work(connection)

        return check_and_work

    def excluded(self, work: Callable[[Connection], T]) -> Callable[[Connection], T]:
        """Return `work`, during which no rollback and no heartbeat of this trainer runs: all lock its row first."""

        def lock_and_work(connection: Connection) -> T:
            transitions.lock_trainer(connection, self._trainer)
            return work(connection)

        return lock_and_work

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Suppress RolledBack, and note that the trainer must start again."""
        try:
            yield
        except RolledBack as error:
            log.warning("starting again from there", reason=str(error))
            self.must_start_again = True
