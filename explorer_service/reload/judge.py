"""Check whether a version may be loaded: unsound ones are rejected, missing ones get some time to appear."""

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
    """A version that an engine may load."""

    row: VersionRow
    manifest: Manifest
    label: str  # the label of an engine that holds it
    folder: Path
    defaults: Sampling  # the engine's defaults for fields that a request does not set
    is_verified: bool = False  # it was staged, and the sha256 of every file was checked

    @property
    def version(self) -> int:
        return self.row.version

    @property
    def sha256(self) -> str:
        """The first digits of the manifest's sha256."""
        return self.label.partition(":")[2]


class VersionJudge:
    """Examines versions for one engine, and remembers since when each one has been missing."""

    def __init__(self, config: Config, ledger: Ledger) -> None:
        self._root = config.root
        self._appear_s = config.explorer.reload.appear_s
        self._ledger = ledger
        self._missing: dict[int, tuple[float, str]] = {}  # by version: since when, time.monotonic(), and what
        self._without_base: set[int] = set()  # missing versions for which version 0 was missing at the last look

    async def examine(self, row: VersionRow) -> TargetVersion | None:
        """Check a version before it is staged; staging also checks its hashes.

        Returns None if the version, or version 0, is not there yet, or if it is missing but an engine has proven it:
        then only this machine does not see it (`overdue`). Raises VersionError if the version has to be rejected;
        EngineError if root_dir contains no versions, or another version 0 than in the ledger; StageFailed if another
        version is in the place of this one, which has served.
        """
        try:
            base, defaults = await asyncio.to_thread(self._read_base, row)
        except VersionExchanged as error:
            raise EngineError(f"{error}; {_OTHER_FOLDER}") from error
        except VersionError as error:  # never the fault of this version
            await asyncio.to_thread(self.require_mounted)
            self._note(row, f"version 0, with which it is compared: {error}; restore its folder")
            self._without_base.add(row.version)
            return None
        if row.version in self._without_base:  # the version itself has its full time to appear
            self._without_base.remove(row.version)
            self._missing.pop(row.version, None)
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
        """Return why a version that an engine has proven is not available here; None: it is, or may still appear."""
        reason = None if row.served_at is None else self._why_given_up(row)
        return None if reason is None else f"{reason}; is root_dir mounted?"

    def _why_given_up(self, row: VersionRow) -> str | None:
        """Return what is missing of a version after its time to appear; None: nothing, or it may still appear."""
        since, what = self._missing.get(row.version, (math.inf, ""))
        if time.monotonic() - since < self._appear_s:
            return None
        return f"{what}; it did not appear within {self._appear_s:g} s"

    def _read_base(self, row: VersionRow) -> tuple[Base | None, Sampling | None]:
        """Read version 0; for an adapter also the sampling defaults, which its own folder does not contain."""
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
        """Raise EngineError if the root folder contains no versions."""
        if not version_folders(self._root):
            raise EngineError(f"{self._root / 'versions'} contains no versions; is root_dir mounted?")

    def _note(self, row: VersionRow, what: str) -> None:
        """Note that the version is missing, and log it once."""
        if row.version not in self._missing:
            log.warning("version is not there yet", version=row.version, reason=what, appear_s=self._appear_s)
        since, _ = self._missing.get(row.version, (time.monotonic(), what))
        self._missing[row.version] = since, what
