"""Recover an engine whose take-up of a version failed: it serves the last good version again, or is restarted.

An engine whose loads are wrong is restarted: it starts on the last good version. vLLM 0.32 on a CPU is one for mixtures
of experts: a load into the running engine gives other weights than a start from the same folder.
"""

from __future__ import annotations

import time
from typing import NoReturn

from explorer_service.engines.admin import EngineAdmin
from explorer_service.errors import EngineDied, LoadsRefused, LoadUndone, NoRoom, ProbeMismatch
from explorer_service.reload.blame import Blame
from explorer_service.reload.judge import TargetVersion
from explorer_service.reload.reloading import Reloading
from explorer_service.reload.take_up import TakeUp, restart_engine
from shared.errors import EngineError

_LONGER = 10  # each wait is so many times as long as the one before it
_MOST_LONGER = 4  # times


class Recovery:
    """Recovers one engine. After a restart, the engine takes up no later version for a while."""

    def __init__(self, admin: EngineAdmin, take_up: TakeUp, blame: Blame, reloading: Reloading) -> None:
        self._admin = admin
        self._take_up = take_up
        self._blame = blame
        self._leases = reloading.leases
        self._first_s = reloading.config.explorer.reload.retry_s
        self._restarts = 0  # since the engine has last taken up a version
        self._wait_until: float | None = None  # time.monotonic(); set when a restarted engine serves again
        self.reason = ""  # why the engine was restarted

    @property
    def _is_restarted(self) -> bool:
        """Whether the engine was restarted, and does not serve again yet."""
        return self._restarts > 0 and self._wait_until is None

    @property
    def must_wait(self) -> bool:
        """Whether an engine that serves again may not take up a later version yet."""
        return self._wait_until is not None and time.monotonic() < self._wait_until

    def note_served(self) -> None:
        """Note that the engine serves: if it was restarted, the wait begins."""
        if self._is_restarted:
            longer = min(self._restarts - 1, _MOST_LONGER)
            self._wait_until = time.monotonic() + self._first_s * _LONGER**longer

    def forget(self) -> None:
        """Note that a load was right."""
        self._restarts, self._wait_until, self.reason = 0, None, ""

    async def go_back(self, target: TargetVersion, good: TargetVersion | None, error: EngineError) -> TargetVersion:
        """Have the engine hold the last good version after the take-up of the target failed. Returns that version.

        Raises EngineUnavailable if the engine is restarted; the error, or another EngineError, if it is not moved.
        """
        if isinstance(error, EngineDied):
            await self._blame.count(target, str(error))
        if isinstance(error, LoadsRefused):
            await self._restart(f"it loads no version: {error}")
        if isinstance(error, ProbeMismatch):
            try:
                await self._load_again(target, good, error)
            except NoRoom:
                if good is None:
                    raise
                return good  # it serves on; whether the version or the engine is wrong shows at the next attempt
        if good is None or not isinstance(error, LoadUndone | ProbeMismatch):
            raise error
        is_technical = isinstance(error, LoadUndone) and error.is_technical
        await (self._blame.count if is_technical else self._blame.condemn)(target, str(error))
        return good

    async def _load_again(self, target: TargetVersion, good: TargetVersion | None, error: ProbeMismatch) -> None:
        if good is not None:
            try:
                await self._take_up.run(good, None)
            except ProbeMismatch as again:
                await self._restart_wrong(again)
        elif target.row.is_proven:
            await self._restart_wrong(error)

    async def _restart_wrong(self, error: ProbeMismatch) -> NoReturn:
        """Restart an engine that computes wrongly after a load of a version that was proven before.

        It is not restarted again until it serves: a start is wrong, too, or it was not started by `flywheel engine`.
        """
        reason = f"its loads are wrong: {error}, also after a load of the last good version"
        if self._is_restarted:
            raise EngineError(
                f"{reason}; restart engine {self._admin.url}; if that does not help, vLLM computes this model "
                "otherwise than the trainer"
            )
        await self._restart(reason)

    async def _restart(self, reason: str) -> NoReturn:
        """Restart an engine that gets no version into service by a load."""
        self._restarts, self._wait_until, self.reason = self._restarts + 1, None, reason
        await self._leases.require_held(self._admin.url)
        await restart_engine(self._admin, reason)
