"""Stage 5, claim: lease READY rows to this trainer.

While no batch is ready, or the ledger is unavailable, the claimer waits without limit and logs the reason once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import Connection

from shared.config import GroupConfig, RewardConfig, TrainerConfig
from shared.errors import LedgerError
from shared.experience import Lease, TrajectoryKey
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.log import StageLogger
from shared.stop_request import StopRequest
from trainer_service.answers import AnswerTokenizer

log = StageLogger("claim")
RESCAN_EVERY_S = 5.0  # between two searches for rows older than the last claimed ones
RESCAN_SHARE = 200  # pause after a search, as a multiple of its duration
WARN_EVERY_S = 5.0  # between two searches, while rows lack, for algorithms that nothing is said to
EXPIRED_EVERY_S = 1.0  # between two searches for expired leases of other trainers


class Claimer:
    """Claims batches from the ledger."""

    def __init__(
        self,
        ledger: Ledger,
        config: TrainerConfig,
        stop: StopRequest,
        vocabulary: int | None = None,
        answers: AnswerTokenizer | None = None,
        check: Callable[[Connection], None] | None = None,
        rule: RewardConfig | None = None,
    ) -> None:
        """vocabulary: number of token ids of the model; rows with other ids are quarantined.

        answers: tokenizer of corrections; None: no algorithm learns from corrections. check: called before each search
        for rows; may raise. rule: of rewards; None: every metric counts as one with a weight, and scores that an
        expired lease refused become no rewards.
        """
        self._ledger = ledger
        self._config = config
        self._stop = stop
        self._vocabulary = vocabulary
        self._group = group_wait(config)
        self._answers = answers
        self._check, self._rule = check, rule
        self._metrics = None if rule is None else rule.metrics
        self._last_event: str | None = None  # the last event that was logged
        self._warn_at = 0.0  # time.monotonic(): when the next search for such algorithms is due
        self._idle: set[str] = set()  # algorithms already logged as receiving no signals
        self._first_ready_at: float | None = None  # time.monotonic()
        self._after_id = 0
        self._corrected_later: Collection[TrajectoryKey] = ()  # of the last batch; see queries.corrected_later
        self._unanswered: int | None = None  # the batch of a claim that may be stored although its answer was lost
        self._rescan_at = self._expired_at = 0.0  # time.monotonic() of the next search

    def next(self) -> Lease | None:
        """Return the next batch, or None after a stop request."""
        while not self._stop:
            try:
                lease = self._stored_without_answer() or self._try()
            except LedgerError as error:
                self._log_once("the ledger is unavailable; waiting", reason=str(error))
                lease = None
            if lease is not None:
                self._last_event = None
                return self._with_corrections(lease)
            self._stop.wait(self._config.poll_interval_s)
        return None

    def _with_corrections(self, lease: Lease) -> Lease:
        if self._answers is None:
            return lease
        return replace(lease, rows=self._answers.with_corrections(lease.rows, self._corrected_later))

    def search_anew(self) -> None:
        """Start the next claim at the oldest READY row, because rows were released."""
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
                at_most_behind=config.max_staleness_versions,
                **self._group,
            )
            self._unanswered = batch_id
            lease = None if batch_id is None else self._load(connection, batch_id)
        self._unanswered = None
        if batch_id is None:
            self._log_missing_rows(at_least)
        return lease

    def _stored_without_answer(self) -> Lease | None:
        """Return the batch of the last claim if it was stored and its answer was lost.

        The heartbeat renews this lease, so it would never expire.
        """
        batch_id = self._unanswered
        if batch_id is None:
            return None
        with self._ledger.write() as connection:
            is_stored = queries.is_leased(connection, batch_id, self._config.name)
            lease = self._load(connection, batch_id) if is_stored else None
        self._unanswered = None
        if not is_stored:
            self.search_anew()
        return lease

    def _rows_required(self) -> tuple[int, int, transitions.Whole] | None:
        """Return the minimum and maximum number of rows of the next batch, and the unit of its claim.

        Returns None if no batch is due.
        """
        with self._ledger.read() as connection:
            if self._check is not None:
                self._check(connection)
            after_id = self._scan_from(connection)
            failures = queries.failures_of_oldest(connection, after_id, **self._group)
            size = self._batch_size(failures)
            ready = queries.count_ready(connection, at_most=size, after_id=after_id)
            expired = self._any_expired(connection)
        whole = self._config.together if failures < 2 else "trajectory"  # single runs isolate one that fails
        if expired:
            with self._ledger.write() as connection:
                # its own may have expired while the database was unavailable
                transitions.extend_lease(connection, owner=self._config.name, lease_s=self._config.lease_s)
            with self._ledger.write() as connection:  # of two trainers at once, each would wait for the other's batch
                returned = transitions.give_back(connection, rule=self._rule)
            if returned:
                log.warning("leases expired without heartbeats from their trainer", rows_taken_back=returned)
        elif not ready:
            self._first_ready_at = None
            self._log_once("no ready rows; waiting for commits")
            self._warn_idle_algorithms()
        elif self._is_overdue():
            return 1, size, whole
        elif ready < size:
            self._log_once("waiting for a whole batch", ready=ready, batch_size=size)
            self._warn_idle_algorithms()
        else:
            return size, size, whole
        return None

    def _log_missing_rows(self, at_least: int) -> None:
        """Log why a claim found too few rows: the others are stale, leased, or incomplete groups."""
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
        """Return the batch size, halved for each failed update of the oldest row after the first failure."""
        return max(1, self._config.batch_size >> max(0, failures - 1))

    def _discard_stale(self, connection: Connection) -> None:
        at_most = self._config.max_staleness_versions
        if at_most is None:
            return
        stale = transitions.discard_stale(connection, at_most_behind=at_most, after_id=self._after_id)
        if stale:
            log.warning("stale rows discarded: rows arrive faster than the trainer learns", stale=stale)

    def _load(self, connection: Connection, batch_id: int) -> Lease | None:
        """Load the claimed rows and quarantine the corrupt ones. Returns None if all are corrupt."""
        config, kinds = self._config, self._config.learns_from
        limits = (self._vocabulary, kinds, config.max_trajectory_tokens)
        lease = queries.load_lease(connection, batch_id, *limits, self._metrics)
        if lease.corrupt:
            transitions.quarantine(connection, lease.corrupt)
            log.error("rows quarantined", rows=len(lease.corrupt), first=next(iter(lease.corrupt.values())))
        if not lease.rows:
            transitions.close_empty_batch(connection, batch_id)
            return None
        self._first_ready_at = None
        self._after_id = lease.rows[0].id
        if self._answers is not None:
            self._corrected_later = queries.corrected_later(connection, lease.rows)
        return self._with_rehearsal(connection, lease)

    def _with_rehearsal(self, connection: Connection, lease: Lease) -> Lease:
        config = self._config
        if not config.rehearse:
            return lease
        bounds = (config.seed, config.learns_again, self._vocabulary, config.max_trajectory_tokens)
        again = queries.draw_rehearsal(connection, config.rehearse, lease.rows, *bounds)
        return replace(lease, rows=[*lease.rows, *again])

    def _scan_from(self, connection: Connection) -> int:
        """Return the id after which rows may be READY. Late rewards and released leases make older rows READY again.

        While a report holds an old snapshot, PostgreSQL keeps index entries of rows that are no longer READY, and a
        scan from the beginning reads all of them. So the claimer searches for the oldest READY row only occasionally.
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

    def _warn_idle_algorithms(self) -> None:
        """Warn once about each algorithm that receives no signal it learns from, and list the signals received."""
        now = time.monotonic()
        if now < self._warn_at:
            return
        self._warn_at = now + WARN_EVERY_S
        said, acting = (
            self._ledger.fetch(partial(queries.recent_kinds, metrics=names)) for names in (None, self._metrics)
        )
        idle = {kind: "" if kind in acting else " without weights (reward.metrics)" for kind in said}
        for name in self._config.parts:
            learned = self._config.settings_of(name).learned
            if said and learned and name not in self._idle and not learned & acting.keys():
                self._idle.add(name)
                counts = ", ".join(f"{kind}{idle[kind]}: {count}" for kind, count in said.items())
                log.warning("nothing is said that it learns from", algorithm=name, learns=sorted(learned), kinds=counts)

    def _log_once(self, event: str, **fields: object) -> None:
        """Log an event unless it was the last one logged."""
        if self._last_event != event:
            log.info(event, **fields)
        self._last_event = event


def group_wait(config: TrainerConfig) -> dict[str, Any]:
    """Return how many runs of a task to wait for, and how long: the maxima over the algorithms in use."""
    sections = [one for one in map(config.settings_of, config.parts) if isinstance(one, GroupConfig)]
    if not sections:
        return {}
    waits = [section.group_timeout_s for section in sections]
    wait_s = None if None in waits else max(wait for wait in waits if wait is not None)
    return {"runs_of_task": max(section.group_size for section in sections), "wait_s": wait_s}
