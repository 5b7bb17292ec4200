"""Stage 2, record: samples become rows, durable before the caller has its answer.

A stream's caller learns the message id from the first event, before the row is stored; feedback for such an id, its
run or its task waits here until it is. With several explorers on one ledger the others know of it by the table
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
from shared.experience import Sample
from shared.ledger import queries, transitions
from shared.ledger.conditions import UNGROUPED
from shared.ledger.transitions import RunName
from shared.log import StageLogger

log = StageLogger("record")

POLL_S = 0.05  # how soon another explorer's stream is asked for again; each time half as long again
MAX_POLL_S = 1.0


async def record(samples: list[Sample], writer: LedgerWriter) -> None:
    """Make samples durable. A caller who leaves meanwhile does not undo it. Raises LedgerError."""
    if samples:  # none: not to be recorded, or a stream that held an error and no choice
        await writer.record(samples)


class _Open(NamedTuple):
    """A stream of this process."""

    run: RunName
    ended: asyncio.Event


class OpenStreams:
    """Streams whose id is known to a caller and whose rows are not stored yet."""

    def __init__(self, reader: LedgerReader, writer: LedgerWriter, membership: Membership) -> None:
        self._reader = reader
        self._writer = writer
        self._membership = membership
        self._open: dict[str, _Open] = {}  # by message id
        self._told: set[str] = set()  # of these: the others know of them
        self._unclosed: set[str] = set()  # have ended, and the others do not know it yet
        membership.on_company = self._tell_all

    @asynccontextmanager
    async def opened(self, msg_id: str, run: RunName) -> AsyncIterator[None]:
        """Around a stream, until its rows are stored or never will be. Raises LedgerError."""
        opened = self._open[msg_id] = _Open(run, asyncio.Event())
        try:
            if not self._membership.is_alone:
                await self._tell({msg_id: run})
            yield
        finally:
            del self._open[msg_id]
            opened.ended.set()
            if msg_id in self._told:
                await self._close(msg_id)

    async def _tell(self, runs: dict[str, RunName]) -> None:
        def open_all(connection: Connection) -> None:
            for msg_id, run in runs.items():
                transitions.open_stream(connection, msg_id, self._membership.id, run)

        self._told.update(runs)  # before it is stored: whoever leaves meanwhile has to take it back
        await self._writer.write(open_all)

    async def _tell_all(self) -> None:
        """There are other explorers now: tell them of the streams that began before. Raises LedgerError."""
        untold = {name: self._open[name].run for name in sorted(self._open.keys() - self._told)}
        try:
            if untold:
                await self._tell(untold)
        except LedgerError:  # the next time, those that are open then
            self._told -= untold.keys() & self._open.keys()
            raise

    async def _close(self, msg_id: str) -> None:
        """Tell the others that it has ended; if the ledger is away, with the end of the next stream."""
        self._told.discard(msg_id)
        self._unclosed.add(msg_id)
        closing = sorted(self._unclosed)

        def close(connection: Connection) -> None:
            for name in closing:
                transitions.close_stream(connection, name)

        try:
            await self._writer.write(close)
        except LedgerError as error:  # its caller has all of it, and the row is stored or was refused before
            log.debug("the end of a stream is not told yet", msg_id=msg_id, reason=str(error))
            return
        self._unclosed.difference_update(closing)

    async def of_task(self, task_id: str, run_id: str | None, key_group: str | None) -> list[str]:
        """The streams of a task, or of one run of it, that are open here or elsewhere. Raises LedgerError.

        key_group: only those whose rows in_group() finds for it.
        """
        found = [
            name
            for name, (run, _) in self._open.items()
            if run.task_id == task_id
            and run_id in (None, run.run_id)
            and key_group in (None, run.key_group or UNGROUPED)
        ]
        if not self._membership.is_alone:
            found += await self._reader.read(lambda c: queries.streams_of_task(c, task_id, run_id, key_group))
        return found

    async def wait_recorded(self, msg_ids: list[str]) -> None:
        """Until none of these is still streamed, here or by another explorer. Raises LedgerError."""
        names = [msg_id.partition("#")[0] for msg_id in msg_ids]
        for name in names:
            if name in self._open:
                await self._open[name].ended.wait()
        if self._membership.is_alone:
            return

        poll_s = POLL_S
        while await self._reader.read(lambda connection: queries.any_stream_open(connection, names)):
            await asyncio.sleep(poll_s)
            poll_s = min(1.5 * poll_s, MAX_POLL_S)
