"""Periodic jobs: commit rows with signals, expire rows without, delete old idempotency keys, merge counts.

All jobs use conditional statements, so any number of explorers may run them on one ledger. Ages are measured by the
database's clock, by which rows and keys are stored with their times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from explorer_service.commit import commit_rows
from explorer_service.ledger_reader import LedgerReader
from explorer_service.ledger_writer import LedgerWriter, WriteInParts
from explorer_service.metrics import ExplorerMetrics
from shared.config import ExplorerConfig
from shared.errors import LedgerError
from shared.ledger import queries, transitions
from shared.ledger.connect import database_time
from shared.log import StageLogger

log = StageLogger("housekeeping")

KEEP_ANSWERS_S = 24 * 3600.0  # how long an Idempotency-Key is stored
FORGET_EVERY_S = 600.0
READ_AT_ONCE = 10_000  # keys
FORGOTTEN_AT_ONCE = 2000  # keys
EXPIRE_EVERY_S = 30.0
MERGE_EVERY_S = 10.0


class Housekeeper:
    """Runs the jobs. `run()` ends only by cancellation."""

    def __init__(
        self,
        config: ExplorerConfig,
        reader: LedgerReader,
        writer: LedgerWriter,
        metrics: ExplorerMetrics,
        *,
        merges_counts: bool,
    ) -> None:
        """merges_counts: the ledger is PostgreSQL, where each change of a count adds a row until they are merged."""
        self._config = config
        self._merges_counts = merges_counts
        self._reader = reader
        self._writer = writer
        self._metrics = metrics
        self._unavailable = False

    async def run(self) -> None:
        expire_s = self._config.expire_after_s
        jobs = [self._every(FORGET_EVERY_S, self._forget)]
        if self._merges_counts:
            jobs.append(self._every(MERGE_EVERY_S, lambda: self._writer.write(transitions.merge_counts)))
        if self._config.commit_every_s is not None:
            jobs.append(self._every(self._config.commit_every_s, self._commit))
        if expire_s is not None:
            jobs.append(self._every(min(EXPIRE_EVERY_S, expire_s / 2), partial(self._expire, expire_s)))
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job, name="housekeeping")

    async def _every(self, interval_s: float, job: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await job()
                self._unavailable = False
            except LedgerError as error:
                if not self._unavailable:  # logged once per outage
                    log.warning("the ledger is unavailable; periodic jobs wait", reason=str(error))
                self._unavailable = True

    async def _commit(self) -> None:
        committed, _ = await commit_rows(self._writer, self._metrics)
        if committed:
            log.debug("committed", rows=committed)

    async def _expire(self, expire_s: float) -> None:
        parts = WriteInParts(self._writer)
        while await parts.write(lambda c: transitions.expire(c, before=database_time(c) - expire_s)):
            log.info("rows expired", older_than_s=expire_s)

    async def _forget(self) -> None:
        before = await self._reader.read(database_time) - KEEP_ANSWERS_S
        parts = WriteInParts(self._writer)
        after: str | None = ""
        while after is not None:
            find = partial(queries.answers_before, before=before, after=after, at_most=READ_AT_ONCE)
            old, after = await self._reader.read(find)
            for start in range(0, len(old), FORGOTTEN_AT_ONCE):
                keys = old[start : start + FORGOTTEN_AT_ONCE]
                await parts.write(partial(transitions.forget_answers, keys=keys, before=before))
