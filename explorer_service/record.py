"""Stage 2, record: samples are stored as rows (ledger_writer.py), durable before the caller has its answer.

A stream's caller gets the message id with the first event, before the row is stored. Feedback for such an id, its run
or its task waits here until the row is stored. Other explorers on the ledger see the stream in the table
`open_streams`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from sqlalchemy import Connection

from explorer_service.ledger_reader import LedgerReader
from explorer_service.ledger_writer import LedgerWriter
from explorer_service.membership import Membership
from shared.errors import LedgerError
from shared.ledger import queries, transitions
from shared.ledger.conditions import UNGROUPED
from shared.ledger.transitions import RunName
from shared.log import StageLogger

log = StageLogger("record")

POLL_S = 0.05  # first pause between queries for another explorer's stream; each next one is 1.5 times as long
MAX_POLL_S = 1.0


class _Open(NamedTuple):
    """A stream of this process."""

    run: RunName
    ended: asyncio.Event


class OpenStreams:
    """Streams whose message id a caller knows, but whose rows are not stored yet."""

    def __init__(self, reader: LedgerReader, writer: LedgerWriter, membership: Membership) -> None:
        self._reader = reader
        self._writer = writer
        self._membership = membership
        self._open: dict[str, _Open] = {}  # by message id
        self._announced: set[str] = set()  # those of them in the table, where other explorers see them
        self._unclosed: set[str] = set()  # streams that have ended, but are still in the table
        membership.on_first_other, membership.on_heartbeat = self._announce_all, self._close_ended

    @asynccontextmanager
    async def opened(self, msg_id: str, run: RunName) -> AsyncIterator[None]:
        """Wrap a stream, until its rows are stored or never will be. Raises LedgerError."""
        opened = self._open[msg_id] = _Open(run, asyncio.Event())
        try:
            if not self._membership.is_alone:
                await self._membership.noticed()
                await self._announce({msg_id: run})
            yield
        finally:
            del self._open[msg_id]
            opened.ended.set()
            if msg_id in self._announced:
                await self._close(msg_id)

    async def _announce(self, runs: dict[str, RunName]) -> None:
        def open_all(connection: Connection) -> None:
            for msg_id, run in runs.items():
                transitions.open_stream(connection, msg_id, self._membership.id, run)

        self._announced.update(runs)  # before the write: a stream that ends meanwhile must delete its entry
        await self._writer.write(open_all)

    async def _announce_all(self) -> None:
        """Announce the streams that began while this explorer was alone. Raises LedgerError, and may be repeated."""
        if self._open:
            await self._announce({name: self._open[name].run for name in sorted(self._open)})

    async def _close(self, msg_id: str) -> None:
        """Delete a stream from the table; if the ledger is unavailable, after the next heartbeat."""
        self._announced.discard(msg_id)
        self._unclosed.add(msg_id)
        await self._close_ended()

    async def _close_ended(self) -> None:
        """Delete the streams that have ended from the table."""
        closing = sorted(self._unclosed)
        if not closing:
            return

        def close(connection: Connection) -> None:
            for name in closing:
                transitions.close_stream(connection, name)

        try:
            await self._writer.write(close)
        except LedgerError as error:  # no error for the caller: its row was stored or refused before
            log.debug("the end of streams is not announced yet", streams=len(closing), reason=str(error))
            return
        self._unclosed.difference_update(closing)

    async def of_task(self, task_id: str, run_id: str | None, key_group: str | None) -> list[str]:
        """Return the ids of open streams of a task, or of one of its runs, in any explorer. Raises LedgerError.

        key_group: only streams whose rows in_group() finds for it.
        """
        found = [
            name
            for name, (run, _) in self._open.items()
            if run.task_id == task_id
            and run_id in (None, run.run_id)
            and key_group in (None, run.key_group or UNGROUPED)
        ]
        if not self._membership.is_alone:
            await self._membership.noticed()
            found += await self._reader.read(lambda c: queries.streams_of_task(c, task_id, run_id, key_group))
        return found

    async def wait_recorded(self, msg_ids: list[str]) -> None:
        """Wait until no explorer streams any of these messages. Raises LedgerError."""
        names = [msg_id.partition("#")[0] for msg_id in msg_ids]
        for name in names:
            if name in self._open:
                await self._open[name].ended.wait()
        if self._membership.is_alone:
            return

        await self._membership.noticed()
        poll_s = POLL_S
        while await self._reader.read(lambda connection: queries.any_stream_open(connection, names)):
            await asyncio.sleep(poll_s)
            poll_s = min(1.5 * poll_s, MAX_POLL_S)
