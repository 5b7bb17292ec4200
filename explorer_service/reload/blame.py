"""Decide after a failed take-up whether the version is to blame, and when the engine retries it.

A version that any engine has proven is never to blame: the failed engine is. An unproven version is rejected if an
engine refuses it or computes other logprobs, and then proves the previous version. Engines that die or take too long
are weaker evidence: the second case fails the version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from sqlalchemy import Connection

from explorer_service.engines.engine import Engine
from explorer_service.errors import EngineDied, LoadsRefused, LoadUndone, NoRoom, ProbeMismatch, StageFailed
from explorer_service.reload.judge import TargetVersion, VersionJudge
from explorer_service.reload.reloading import Reloading
from shared.errors import EngineError, VersionError, VersionMissing
from shared.ledger import transitions
from shared.ledger.queries import VersionRow
from shared.log import StageLogger

log = StageLogger("reload")

_GIVEN_UP_AFTER = 2  # deaths and timeouts
_LONGEST_WAIT, _LONGEST_FOR_ROOM = 100, 8  # multiples of the first wait


class _Failed(NamedTuple):
    times: int
    due_at: float
    reason: str
    for_room: bool


class Backoff:
    """When an engine may retry a version whose take-up failed: after a time that doubles.

    If it only had no room, the time stays short, and ends when another version is unloaded.
    """

    def __init__(self, first_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._first_s = first_s
        self._clock = clock
        self._failed: dict[int, _Failed] = {}  # by version

    def note(self, version: int, failure: EngineError | VersionError | str) -> None:
        """Note why the take-up failed."""
        for_room = isinstance(failure, NoRoom)
        times = self._failed[version].times + 1 if version in self._failed else 1
        longest = _LONGEST_FOR_ROOM if for_room else _LONGEST_WAIT
        due_at = self._clock() + self._first_s * min(2 ** min(times - 1, 30), longest)
        self._failed[version] = _Failed(times, due_at, str(failure), for_room)

    def waiting_for_room(self) -> set[int]:
        """Return the versions that may not be tried yet, because there was no room."""
        return {version for version, failed in self._failed.items() if failed.for_room and self.wait_s(version)}

    def end_waits_for_room(self) -> None:
        """Allow at once the versions for which there was no room."""
        self._failed = {version: failed for version, failed in self._failed.items() if not failed.for_room}

    def retry(self, version: int) -> None:
        """Allow the version at once, as if it were new."""
        self._failed.pop(version, None)

    def forget(self, version: int) -> None:
        """Forget this version, which was taken up, and older ones."""
        self._failed = {other: failed for other, failed in self._failed.items() if other > version}

    def wait_s(self, version: int) -> float:
        """Return the time until the version may be tried; 0: now."""
        return max(0.0, self._failed[version].due_at - self._clock()) if version in self._failed else 0.0

    def waiting(self) -> dict[int, str]:
        """Return the versions that may not be tried yet, and why their take-up failed."""
        return {version: failed.reason for version, failed in self._failed.items() if self.wait_s(version)}

    def reason(self, version: int) -> str:
        """Return why the version's take-up failed; empty if it did not."""
        return self._failed[version].reason if version in self._failed else ""


class Blame:
    """Decides after failures of one engine."""

    def __init__(self, engine: Engine, judge: VersionJudge, reloading: Reloading) -> None:
        self._key = reloading.leases.key(engine.url)
        self._engine = engine
        self._by = f"engine {engine.name}"
        self._judge = judge
        self._reloading = reloading

    def note(self, version: int, error: EngineError | VersionError, backoff: Backoff) -> None:
        """Report a failed take-up, and note it."""
        log.error("version not taken up", version=version, engine=self._engine.name, reason=str(error))
        self._reloading.metrics.reload_failures.labels(failure_name(error)).inc()
        backoff.note(version, error)

    async def condemn(self, target: TargetVersion, reason: str) -> None:
        """Reject a version that a healthy engine cannot serve, unless another engine has proven it."""
        await self._decide(
            target.row,
            reason,
            lambda c: transitions.reject_version(c, target.version, reason, by=self._by, only_unproven=True),
        )

    async def count(self, target: TargetVersion, reason: str) -> None:
        """Count a death or timeout of the engine. The second one fails the version, unless an engine has proven it."""
        await self._decide(target.row, reason, lambda c: self._count(c, target.version, reason))

    def _count(self, connection: Connection, version: int, reason: str) -> bool:
        failures = transitions.count_load_failure(connection, version, self._key, reason)
        if failures < _GIVEN_UP_AFTER:
            return False
        why = f"{failures} engines died of it, or took too long; the last one: {reason}"
        return transitions.fail_version(connection, version, why, by=self._by)

    async def reject(self, row: VersionRow, error: VersionError) -> None:
        """Reject a damaged version; a missing one only if no engine has proven it.

        Raises EngineError if root_dir is not there, LedgerError.
        """
        reason, only_unproven = str(error), isinstance(error, VersionMissing)
        is_rejected = await self._decide(
            row,
            reason,
            lambda c: transitions.reject_version(c, row.version, reason, by=self._by, only_unproven=only_unproven),
        )
        if is_rejected:
            self._reloading.metrics.reload_failures.labels("unsound").inc()

    async def _decide(self, row: VersionRow, reason: str, decide: Callable[[Connection], bool]) -> bool:
        """Run `decide`. Returns whether it gave the version up."""
        await asyncio.to_thread(self._judge.require_mounted)
        if not await self._reloading.writer.write(decide):
            return False
        log.error("version given up", version=row.version, reason=reason)
        self._reloading.metrics.reloads.labels("rejected").inc()
        await self._reloading.poller.refresh()  # so that it is no longer the newest
        return True


def failure_name(error: EngineError | VersionError) -> str:
    """Return the name of a take-up's failure in the metrics."""
    match error:
        case NoRoom():
            return "room"
        case LoadUndone():
            return "timeout" if error.is_technical else "load"
        case LoadsRefused():
            return "load"
        case ProbeMismatch():
            return "probe"
        case EngineDied():
            return "death"
        case StageFailed() | VersionError():
            return "stage"
    return "refused"
