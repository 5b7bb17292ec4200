"""Stage 5, claim: ready rows are leased to this trainer, and the lease is extended while it works.

The claimer waits without end when there is nothing to do, and while the ledger is unavailable; it logs either once.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from shared.config import GroupConfig, TrainerConfig
from shared.errors import LedgerError
from shared.experience import Lease
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.log import StageLogger
from shared.reward import kinds_learned_again, learned_kinds
from shared.stop_request import StopRequest
from trainer_service.answers import AnswerTokenizer

log = StageLogger("claim")
RESCAN_EVERY_S = 5.0  # how often to search for rows older than the last claimed ones
RESCAN_SHARE = 200  # a search is followed by at least this many times its duration without one
EXPIRED_EVERY_S = 1.0  # how often to search for expired leases of other trainers


class Claimer:
    """Takes batches from the ledger."""

    def __init__(
        self,
        ledger: Ledger,
        config: TrainerConfig,
        stop: StopRequest,
        vocabulary: int | None = None,
        whole: transitions.Whole = "run",
        answers: AnswerTokenizer | None = None,
    ) -> None:
        """vocabulary: how many token ids the model knows; rows with others are quarantined.

        whole: what is claimed together: trajectories, or all runs of a task. answers: None: corrections teach nothing.
        """
        self._ledger = ledger
        self._config = config
        self._stop = stop
        self._vocabulary = vocabulary
        self._whole = whole
        self._group = group_wait(config)
        self._answers = answers
        self._last_event: str | None = None  # that was logged
        self._idle: set[str] = set()  # algorithms for which nothing is said, as was logged
        self._first_ready_at: float | None = None  # time.monotonic()
        self._after_id = 0
        self._rescan_at = self._expired_at = 0.0  # time.monotonic() of the next search

    def next(self) -> Lease | None:
        """The next batch, or None when asked to stop."""
        while not self._stop:
            try:
                lease = self._try()
            except LedgerError as error:
                self._log_once("the ledger is unavailable; waiting", reason=str(error))
                lease = None
            if lease is not None:
                self._last_event = None
                return self._with_corrections(lease)
            self._stop.wait(self._config.poll_interval_s)
        return None

    def _with_corrections(self, lease: Lease) -> Lease:
        return lease if self._answers is None else replace(lease, rows=self._answers.with_corrections(lease.rows))

    def search_anew(self) -> None:
        """Rows went back: the next claim begins with the oldest that is ready."""
        self._rescan_at = 0.0

    def _try(self) -> Lease | None:
        bounds = self._rows_required()
        if bounds is None:
            return None
        at_least, at_most, whole = bounds
        config = self._config
        with self._ledger.write() as connection:
            self._discard_stale(connection)
            batch_id = transitions.claim(
                connection,
                owner=config.name,
                at_least=at_least,
                at_most=at_most,
                lease_s=config.lease_s,
                share_per_key=config.max_share_per_key,
                after_id=self._after_id,
                group_rows=config.max_trajectory_rows,
                whole=whole,
                next_messages="hint" in config.parts and config.hint.next_message is not None,
                **(self._group if whole == "task" else {}),
            )
            if batch_id is not None:
                return self._load(connection, batch_id)
        self._say_who_waits(at_least)
        return None

    def _rows_required(self) -> tuple[int, int, transitions.Whole] | None:
        """How many rows the next batch has at least and at most, and what of them is claimed together.

        None when it is not time for one.
        """
        with self._ledger.read() as connection:
            after_id = self._scan_from(connection)
            failures = queries.failures_of_oldest(connection, after_id)
            size = self._batch_size(failures)
            ready = queries.count_ready(connection, at_most=size, after_id=after_id)
            expired = self._any_expired(connection)
        whole: transitions.Whole = self._whole if failures < 2 else "run"  # or a run in it could never stand alone
        if expired:
            with self._ledger.write() as connection:
                returned = transitions.give_back(connection)
            log.warning("leases of a trainer without heartbeats expired", rows_taken_back=returned)
        elif not ready:
            self._first_ready_at = None
            if self._log_once("no ready rows; waiting for commits"):
                self._name_idle()
        elif self._is_overdue():
            return 1, size, whole
        elif ready < size:
            if self._log_once("waiting for a whole batch", ready=ready, batch_size=size):
                self._name_idle()
        else:
            return size, size, whole
        return None

    def _say_who_waits(self, at_least: int) -> None:
        """Of a claim that found too few rows: others are stale, another trainer's, or wait for others."""
        share, timeout_s = self._config.max_share_per_key, self._config.batch_timeout_s
        if share < 1 or self._group:
            self._log_once(
                "a batch is not whole without rows that wait for other keys, or for other runs of their tasks",
                batch_size=at_least,
                max_share_per_key=share,
                group_size=self._group.get("runs_of_task", 1),
                batch_timeout_s="null" if timeout_s is None else timeout_s,
            )

    def _batch_size(self, failures: int) -> int:
        """Rows in a batch, with the oldest of which so many updates failed: half of them after the second failure."""
        return max(1, self._config.batch_size >> max(0, failures - 1))

    def _discard_stale(self, connection: Connection) -> None:
        at_most = self._config.max_staleness_versions
        if at_most is None:
            return
        stale = transitions.discard_stale(connection, at_most_behind=at_most, after_id=self._after_id)
        if stale:
            log.warning("rows discarded: the trainer is slower than they come", stale=stale)

    def _load(self, connection: Connection, batch_id: int) -> Lease | None:
        """The claimed rows; None when all of them are corrupt."""
        config, kinds = self._config, learned_kinds(self._config)
        lease = queries.load_lease(connection, batch_id, self._vocabulary, kinds, config.max_trajectory_tokens)
        if lease.corrupt:
            transitions.quarantine(connection, lease.corrupt)
            log.error("rows quarantined", rows=len(lease.corrupt), first=next(iter(lease.corrupt.values())))
        if not lease.rows:
            transitions.close_empty_batch(connection, batch_id)
            return None
        self._first_ready_at = None
        self._after_id = lease.rows[0].id
        return self._with_rehearsal(connection, lease)

    def _with_rehearsal(self, connection: Connection, lease: Lease) -> Lease:
        config = self._config
        if not config.rehearse:
            return lease
        bounds = (config.seed, kinds_learned_again(config), self._vocabulary, config.max_trajectory_tokens)
        again = queries.draw_rehearsal(connection, config.rehearse, lease.rows, *bounds)
        return replace(lease, rows=[*lease.rows, *again])

    def _scan_from(self, connection: Connection) -> int:
        """The id after which rows may be ready. Older rows become ready only by a late reward or a returned lease.

        While a report holds an old snapshot open, PostgreSQL keeps the index entries of rows that are no longer ready,
        and a scan from the beginning reads all of them. So the oldest ready row is searched for only now and then.
        """
        began = time.monotonic()
        if began >= self._rescan_at:
            oldest = queries.oldest_ready(connection)
            if oldest is not None:
                self._after_id = oldest - 1
            ended = time.monotonic()
            self._rescan_at = ended + max(RESCAN_EVERY_S, RESCAN_SHARE * (ended - began))
        return self._after_id

    def _any_expired(self, connection: Connection) -> bool:
        now = time.monotonic()
        if now < self._expired_at:
            return False
        self._expired_at = now + EXPIRED_EVERY_S
        return queries.any_lease_expired(connection)

    def _is_overdue(self) -> bool:
        """Whether ready rows have waited for batch_timeout_s."""
        now = time.monotonic()
        if self._first_ready_at is None:
            self._first_ready_at = now
        timeout_s = self._config.batch_timeout_s
        return timeout_s is not None and now - self._first_ready_at >= timeout_s

    def _name_idle(self) -> None:
        """Say once of each algorithm whether nobody says what it learns from, and what is said instead."""
        kinds = self._ledger.fetch(queries.recent_kinds)
        for name in self._config.parts:
            learned = self._config.settings_of(name).learned
            if kinds and learned and name not in self._idle and not learned & kinds.keys():
                self._idle.add(name)
                counts = ", ".join(f"{kind}: {count}" for kind, count in kinds.items())
                log.warning("nothing is said that it learns from", algorithm=name, learns=sorted(learned), kinds=counts)

    def _log_once(self, event: str, **fields: object) -> bool:
        """Returns whether it was logged."""
        is_new = self._last_event != event
        if is_new:
            log.info(event, **fields)
        self._last_event = event
        return is_new


def group_wait(config: TrainerConfig) -> dict[str, Any]:
    """How many runs of a task are waited for, and how long: as the most patient of the algorithms in use."""
    sections = [one for one in map(config.settings_of, config.parts) if isinstance(one, GroupConfig)]
    if not sections:
        return {}
    waits = [section.group_timeout_s for section in sections]
    wait_s = None if None in waits else max(wait for wait in waits if wait is not None)
    return {"runs_of_task": max(section.group_size for section in sections), "wait_s": wait_s}


class Heartbeat:
    """A side task that extends this trainer's leases while an update runs. The trainer stops when it dies."""

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
                log.debug("no heartbeat: the ledger is unavailable", reason=str(error))
            except Exception:  # the boundary of this thread: without heartbeats the leases would expire unnoticed
                log.exception("the heartbeat died; the trainer stops")
                self._stop.set()
                return
