"""Choose the versions that an engine may load: the one that should serve, and the last good one to fall back to."""

from __future__ import annotations

from collections.abc import Collection

from explorer_service.errors import StageFailed
from explorer_service.reload.blame import Backoff, Blame
from explorer_service.reload.judge import TargetVersion, VersionJudge
from explorer_service.reload.reloading import Reloading
from explorer_service.reload.take_up import TakeUp
from shared.errors import VersionError
from shared.experience import VersionState
from shared.ledger.queries import VersionRow, find_versions, kept_versions


class VersionChoice:
    """The choice for one engine. It rejects unsound versions."""

    def __init__(
        self, judge: VersionJudge, blame: Blame, take_up: TakeUp, backoff: Backoff, reloading: Reloading
    ) -> None:
        self._judge = judge
        self._blame = blame
        self._take_up = take_up
        self._backoff = backoff
        self._reloading = reloading

    async def examine(self, row: VersionRow) -> TargetVersion | None:
        """Return a version that may be loaded; None: it is not there yet, or was rejected now.

        Raises StageFailed if an engine has proven it, but this machine does not see it, or sees another in its place;
        EngineError if root_dir contains no versions, or another version 0.
        """
        try:
            target = await self._judge.examine(row)
        except VersionError as error:
            await self._blame.reject(row, error)
            return None
        if target is None and (reason := self._judge.overdue(row)) is not None:
            raise StageFailed(reason)
        return target

    async def is_withdrawn(self, served: int | None, wanted: int) -> bool:
        """Whether the version that an engine serves was given up, or an operator wants an earlier one."""
        if served is None or served >= wanted:
            return served is not None and served > wanted
        row = (await self._reloading.fetch(lambda c: find_versions(c, [served]))).get(served)
        return row is not None and row.state == VersionState.REJECTED

    async def find_good(
        self, failed: int, served: TargetVersion | None, damaged: Collection[int] = ()
    ) -> TargetVersion | None:
        """Return what this engine served before, or else the last earlier version that has served, or the base.

        failed, damaged: versions to exclude.
        """
        excluded = {failed, *damaged}
        rows = [
            row for row in await self._reloading.fetch(kept_versions) if row.version not in excluded and row.may_serve
        ]
        rows = [row for row in rows if row.version == 0 or row.kind == self._reloading.config.model.kind]
        if served is not None and any(row.version == served.version for row in rows):
            return served
        for row in reversed(rows):
            if row.version < failed and row.has_served and not self._backoff.wait_s(row.version):
                try:
                    target = await self.examine(row)
                except StageFailed:
                    continue  # an older one may be available
                if target is not None:
                    return target
        return None

    async def stage_good(self, failed: int, served: TargetVersion | None) -> TargetVersion | None:
        """Stage the version to fall back to if a load fails. Raises StageFailed.

        If one is damaged, an older one is used. The damaged one is not rejected: an engine has proven it, and only the
        copy on this engine's machine may be damaged.
        """
        damaged: dict[int, str] = {}
        while (good := await self.find_good(failed, served, damaged)) is not None:
            try:
                return await self._take_up.stage(good)
            except VersionError as error:
                damaged[good.version] = str(error)
        if damaged:
            raise StageFailed(f"the version to fall back to is damaged: {'; '.join(damaged.values())}")
        return None
