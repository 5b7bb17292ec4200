"""Which versions an engine may be given: the one that should serve, and the last good one, to which it goes back."""

from __future__ import annotations

from collections.abc import Collection

from explorer_service.errors import StageFailed
from explorer_service.reload.blame import Backoff, Blame
from explorer_service.reload.judge import TargetVersion, VersionJudge
from explorer_service.reload.reloading import Reloading
from explorer_service.reload.take_up import TakeUp
from shared.errors import VersionError
from shared.ledger.queries import VersionRow, list_versions


class VersionChoice:
    """For one engine. What is unsound is rejected on the way."""

    def __init__(self, judge: VersionJudge, blame: Blame, take_up: TakeUp, backoff: Backoff, shared: Reloading) -> None:
        self._judge = judge
        self._blame = blame
        self._take_up = take_up
        self._backoff = backoff
        self._shared = shared

    async def examine(self, row: VersionRow) -> TargetVersion | None:
        """A version that may go in; None: it is not there yet, or rejected now.

        Raises StageFailed when an engine has proven it, and this machine does not see it, or has another in its place;
        EngineError when root_dir holds no version at all, or another version 0.
        """
        try:
            target = await self._judge.examine(row)
        except VersionError as error:
            await self._blame.reject(row, error)
            return None
        if target is None and (reason := self._judge.overdue(row)) is not None:
            raise StageFailed(reason)
        return target

    async def find_good(
        self, failed: int, served: TargetVersion | None, damaged: Collection[int] = ()
    ) -> TargetVersion | None:
        """What this engine has served before, or else the newest other version that has ever served, or the base.

        damaged: versions to leave out.
        """
        left_out = {failed, *damaged}
        rows = [row for row in await self._shared.fetch(list_versions) if row.version not in left_out and row.may_serve]
        rows = [row for row in rows if row.version == 0 or row.kind == self._shared.config.model.kind]
        if served is not None and any(row.version == served.version for row in rows):
            return served
        for row in reversed(rows):
            if (row.served_at is not None or row.version == 0) and not self._backoff.wait_s(row.version):
                try:
                    target = await self.examine(row)
                except StageFailed:
                    continue  # an older one may be there
                if target is not None:
                    return target
        return None

    async def stage_good(self, failed: int, served: TargetVersion | None) -> TargetVersion | None:
        """What goes back in when a load fails, where the engine can read it. Raises StageFailed.

        If one is damaged, an older one takes its place. The damaged one is not rejected: an engine has proven it, and
        the damage may be on this engine's machine only.
        """
        damaged: dict[int, str] = {}
        while (good := await self.find_good(failed, served, damaged)) is not None:
            try:
                return await self._take_up.stage(good)
            except VersionError as error:
                damaged[good.version] = str(error)
        if damaged:
            raise StageFailed(f"what would go back in is damaged: {'; '.join(damaged.values())}")
        return None
