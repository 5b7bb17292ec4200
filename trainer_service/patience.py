"""Writes to the ledger that wait until it is available."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection

from shared.errors import LedgerError
from shared.ledger.connect import Ledger
from shared.log import StageLogger
from shared.stop_request import StopRequest
from trainer_service.errors import Stopped

log = StageLogger("trainer")
T = TypeVar("T")


class PatientLedger:
    """`write(work)` runs `work` in a write transaction, and retries until the ledger is available."""

    def __init__(self, ledger: Ledger, stop: StopRequest, poll_interval_s: float) -> None:
        self._ledger, self._stop, self._poll_interval_s = ledger, stop, poll_interval_s

    def write(self, work: Callable[[Connection], T]) -> T:
        """Return the result of `work`. Raises Stopped after a stop request."""
        warned = False
        while True:
            try:
                with self._ledger.write() as connection:
                    return work(connection)
            except LedgerError as error:
                if not warned:
                    log.warning("the ledger is unavailable; waiting", reason=str(error))
                warned = True
            if self._stop.wait(self._poll_interval_s):
                raise Stopped
