"""May a version go into an engine? Not an unsound one; and one that is not there yet is looked for a while longer."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from pathlib import Path

from explorer_service.errors import StageFailed
from explorer_service.reload.probe import read_sampling_defaults
from shared.belonging import version_folders
from shared.config import Config
from shared.errors import EngineError, VersionError, VersionExchanged, VersionMissing
from shared.experience import Sampling
from shared.ledger.connect import Ledger
from shared.ledger.queries import VersionRow, find_versions
from shared.log import StageLogger
from shared.soundness import Base, read_base, require_well_formed
from shared.versions import Manifest, version_label, version_path

log = StageLogger("reload")

_OTHER_FOLDER = (
    "root_dir belongs to another ledger, or this folder was changed: correct root_dir, or restore the folder"
)


@dataclass(frozen=True, slots=True)
class TargetVersion:
    """A version that may go into an engine."""

    row: VersionRow
    manifest: Manifest
    label: str  # what an engine that holds it says of its weights
    folder: Path
    defaults: Sampling  # what it applies where a request sets nothing
    is_verified: bool = False  # it was staged: every file had its sha256

    @property
    def version(self) -> int:
        return self.row.version

    @property
    def sha256(self) -> str:
        """The beginning of its manifest's sha256."""
        return self.label.partition(":")[2]


class VersionJudge:
    """Examines versions for one engine, and remembers since when each missing one has been looked for."""

    def __init__(self, config: Config, ledger: Ledger) -> None:
        self._root = config.root
        self._appear_s = config.explorer.reload.appear_s
        self._ledger = ledger
        self._missing: dict[int, tuple[float, str]] = {}  # since when, time.monotonic(), and what; by version

    async def examine(self, row: VersionRow) -> TargetVersion | None:
        """A version that may go into an engine once it is staged, which checks its hashes, too.

        Returns None when the version, or version 0, is not there yet. One that an engine has proven is somewhere: then
        this machine does not see it, however long that lasts (`overdue`).
        Raises VersionError when the version is to be rejected, EngineError when root_dir holds no version at all or
        another version 0 than the ledger names, StageFailed when it holds another one in the place of this one, which
        has served.
        """
        try:
            base, defaults = await asyncio.to_thread(self._read_base, row)
        except VersionExchanged as error:
            raise EngineError(f"{error}; {_OTHER_FOLDER}") from error
        except VersionError as error:  # no fault of this version's, however long it lasts
            await asyncio.to_thread(self.require_mounted)
            self._note(row, f"version 0, with which it is compared: {error}; restore its folder")
            return None
        try:
            target = await asyncio.to_thread(self._find, row, base, defaults)
        except VersionExchanged as error:
            if row.version == 0:
                raise EngineError(f"{error}; {_OTHER_FOLDER}") from error
            if row.served_at is not None:
                raise StageFailed(f"{error}; {_OTHER_FOLDER}") from error
            raise
        except VersionMissing as error:
            await asyncio.to_thread(self.require_mounted)
            self._note(row, str(error))
            reason = self._why_given_up(row)
            if reason is None or row.served_at is not None:
                return None
            raise VersionMissing(reason) from error
        self._missing.pop(row.version, None)
        return target

    def overdue(self, row: VersionRow) -> str | None:
        """Why a version that an engine has proven cannot be had here; None when it can, or may still appear."""
        reason = None if row.served_at is None else self._why_given_up(row)
        return None if reason is None else f"{reason}; is root_dir mounted?"

    def _why_given_up(self, row: VersionRow) -> str | None:
        """What is missing of a version that had its time to appear; None: nothing is, or it may still appear."""
        since, what = self._missing.get(row.version, (math.inf, ""))
        if time.monotonic() - since < self._appear_s:
            return None
        return f"{what}; it has been looked for during {self._appear_s:g} s"

    def _read_base(self, row: VersionRow) -> tuple[Base | None, Sampling | None]:
        """Version 0, and of an adapter how engines sample, for its folder has no configuration of the model."""
        if row.version == 0:
            return None, None
        first = self._ledger.fetch(lambda connection: find_versions(connection, [0])).get(0)
        base = None if first is None else read_base(self._root, first)
        return base, read_sampling_defaults(self._root / version_path(0)) if row.kind == "lora" else None

    def _find(self, row: VersionRow, base: Base | None, defaults: Sampling | None) -> TargetVersion:
        manifest = require_well_formed(self._root, row, base)
        folder = (self._root / row.path).resolve()
        label = version_label(row.version, folder)
        return TargetVersion(row, manifest, label, folder, defaults or read_sampling_defaults(self._root / row.path))

    def require_mounted(self) -> None:
        """Raise EngineError when the root folder holds no version at all."""
        if not version_folders(self._root):
            raise EngineError(f"{self._root / 'versions'} holds no version at all; is root_dir mounted?")

    def _note(self, row: VersionRow, what: str) -> None:
        """The version is missing. Logged once."""
        if row.version not in self._missing:
            log.warning("version is not there yet", version=row.version, reason=what, appear_s=self._appear_s)
        since, _ = self._missing.get(row.version, (time.monotonic(), what))
        self._missing[row.version] = since, what
