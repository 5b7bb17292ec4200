"""Stage 5, claim: ready rows are leased to this trainer, and the lease is kept while it works.

Waits for ever when there is nothing to do, and says so once. A ledger that is away is waited for, too.
"""

from __future__ import annotations

import threading
import time

from sqlalchemy import Connection

from shared.config import TrainerConfig
from shared.errors import LedgerError
from shared.experience import Lease
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.lifecycle import StopRequest
from shared.log import StageLogger

log = StageLogger("claim")
LOOK_BACK_S = 5.0  # how often rows older than the last claimed ones are looked for
LOOK_BACK_SHARE = 200  # and no more often than this many times what it takes
EXPIRED_EVERY_S = 1.0  # how often leases of others that ran out are looked for


class Claimer:
    """Takes batches from the ledger."""

    def __init__(self, ledger: Ledger, config: TrainerConfig, stop: StopRequest) -> None:
        self._ledger = ledger
        self._config = config
        self._stop = stop
        self._said: str | None = None
        self._first_ready_at: float | None = None  # time.monotonic()
        self._after_id = 0
        self._look_back_at = self._expired_at = 0.0  # time.monotonic(): when next

    def next(self) -> Lease | None:
        """The next batch, or None when asked to stop."""
        while not self._stop:
            try:
                lease = self._try()
            except LedgerError as error:
                self._say_once("the ledger is away; waiting", reason=str(error))
                lease = None
            if lease is not None:
                self._said = None
                return lease
            self._stop.wait(self._config.poll_interval_s)
        return None

    def _try(self) -> Lease | None:
        config = self._config
        with self._ledger.read() as connection:
            floor = self._floor(connection)
            ready = transitions.count_ready(connection, at_most=config.batch_size, after_id=floor)
            expired = self._any_expired(connection)
        if expired:
            with self._ledger.write() as connection:
                returned = transitions.give_back(connection)
            log.warning("leases of a trainer that is not heard of ran out", rows_taken_back=returned)
            return None
        overdue = ready > 0 and self._is_overdue()
        if ready < config.batch_size and not overdue:
            if not ready:
                self._first_ready_at = None
                self._say_once("no ready rows; waiting for commits")
            else:
                self._say_once("waiting for a whole batch", ready=ready, batch_size=config.batch_size)
            return None
        at_least = 1 if overdue else config.batch_size  # fewer may be left once the stale ones are out
        with self._ledger.write() as connection:
            if config.max_staleness_versions is not None:
                stale = transitions.discard_stale(
                    connection, at_most_behind=config.max_staleness_versions, after_id=self._after_id
                )
                if stale:
                    log.warning("rows discarded: the trainer is slower than they come", stale=stale)
            batch_id = transitions.claim(
                connection,
                owner=config.name,
                at_least=at_least,
                at_most=config.batch_size,
                lease_s=config.lease_s,
                share_per_key=config.max_share_per_key,
                after_id=self._after_id,
            )
            if batch_id is None:
                return None
            lease = transitions.load_lease(connection, batch_id)
            if lease.corrupt:
                transitions.quarantine(connection, lease.corrupt)
                log.error("rows quarantined", rows=len(lease.corrupt), first=next(iter(lease.corrupt.values())))
            if not lease.rows:
                transitions.close_empty_batch(connection, batch_id)
                return None
            self._first_ready_at = None
            self._after_id = lease.rows[0].id
            return lease

    def _floor(self, connection: Connection) -> int:
        """Where to look from: nothing older is ready, but for what was rewarded or given back late.

        While a report holds an old snapshot open PostgreSQL keeps every index entry of rows that are ready no more, and
        a look from the beginning goes through all of them: so that is done now and then only.
        """
        began = time.monotonic()
        if began >= self._look_back_at:
            oldest = transitions.oldest_ready(connection)
            if oldest is not None:
                self._after_id = oldest - 1
            ended = time.monotonic()
            self._look_back_at = ended + max(LOOK_BACK_S, LOOK_BACK_SHARE * (ended - began))
        return self._after_id

    def _any_expired(self, connection: Connection) -> bool:
        now = time.monotonic()
        if now < self._expired_at:
            return False
        self._expired_at = now + EXPIRED_EVERY_S
        return transitions.any_lease_expired(connection)

    def _is_overdue(self) -> bool:
        """Whether ready rows have waited for batch_timeout_s."""
        now = time.monotonic()
        if self._first_ready_at is None:
            self._first_ready_at = now
        timeout_s = self._config.batch_timeout_s
        return timeout_s is not None and now - self._first_ready_at >= timeout_s

    def _say_once(self, event: str, **fields: object) -> None:
        if self._said != event:
            log.info(event, **fields)
        self._said = event


class Heartbeat:
    """A side task that keeps this trainer's leases while an update runs. Its death stops the trainer."""

    def __init__(self, ledger: Ledger, config: TrainerConfig, stop: StopRequest) -> None:
        self._ledger = ledger
        self._config = config
        self._stop = stop
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        interval_s = min(self._config.lease_s / 4, 5.0)
        while not self._ended.wait(interval_s):
            try:
                with self._ledger.write() as connection:
                    transitions.extend_lease(connection, owner=self._config.name, lease_s=self._config.lease_s)
            except LedgerError as error:
                log.debug("no heartbeat: the ledger is away", reason=str(error))
            except Exception:  # the boundary of this thread: without heartbeats the leases would run out unseen
                log.exception("the heartbeat died; the trainer stops")
                self._stop.set()
                return
