"""The trainer's saved state: written before its rows become CONSUMED, and loaded after a crash.

A state is a folder ROOT/trainer/NAME/state-000012/. It is valid only while the ledger names it, in the trainer's row or
in the row of an older state that is kept. The transaction that names it also marks its rows CONSUMED. A state that no
row names is garbage. A state is loaded only if its files have the SHA-256 in the trainer's row, because a modified
state would be trained on and published.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shared.errors import DiskFull, StartupError, first_line, is_full
from shared.experience import JSON
from shared.ledger.queries import TrainerRow
from shared.log import StageLogger
from shared.versions import fsync
from trainer_service.backends.deepspeed import DeepSpeedBackend
from trainer_service.disk import set_aside, size_of, sweep
from trainer_service.errors import SaveError
from trainer_service.past_policy import PastPolicy
from trainer_service.ranks import together
from trainer_service.state_files import read_state, write_state

log = StageLogger("trainer")
_MEMORY = "memory.json"  # of the algorithms; states saved by older versions of Flywheel have none


@dataclass(frozen=True, slots=True)
class SavedState:
    """A saved state on disk."""

    path: str  # relative to the root
    sha256: str | None  # of its files; None: an older version of Flywheel saved it


def saved_state(row: TrainerRow | None) -> SavedState | None:
    """Return the state that the trainer's row names."""
    return None if row is None or row.state_path is None else SavedState(row.state_path, row.state_sha256)


def state_path(trainer: str, version: int) -> str:
    """Return the folder of the state that a trainer saves with a version, relative to the root folder."""
    return f"trainer/{trainer}/state-{version:06d}"


class StateStore:
    """The folder of one trainer's states, locked until `close`."""

    def __init__(self, root: Path, trainer: str) -> None:
        self._root = root
        self._trainer = trainer
        self.folder = root / "trainer" / trainer
        self._lock = self._take_lock(trainer)

    def _take_lock(self, trainer: str) -> IO[str]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / "lock").open("w")
        except OSError as exc:
            raise StartupError(f"{self.folder} cannot be written ({exc.strerror}); correct its permissions") from exc
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            lock.close()
            raise StartupError(
                f"a trainer named {trainer!r} already runs on this root_dir; stop it, or change trainer.name"
            ) from exc
        return lock

    def save(self, backend: DeepSpeedBackend, memory: JSON, version: int, past: PastPolicy | None = None) -> SavedState:
        """Write the state of a version durably. On failure, remove it and raise DiskFull or SaveError.

        memory: of the algorithms, as JSON. past: earlier weights of the policy.
        """
        folder = self._root / state_path(self._trainer, version)
        try:
            if folder.exists():  # left by a crash
                shutil.rmtree(folder)
            with together():
                write_state(backend, folder)
            if past is not None:
                past.save(folder)
            (folder / _MEMORY).write_text(json.dumps(memory, allow_nan=False), encoding="utf-8")
            for path in sorted(folder.rglob("*"), reverse=True):
                fsync(path)
            fsync(folder)
            fsync(self.folder)
            return SavedState(str(folder.relative_to(self._root)), _digest(folder))
        except (OSError, RuntimeError, ValueError) as exc:  # PyTorch raises RuntimeError for a full disk
            reason = first_line(exc)
            kind = DiskFull if is_full(exc) else SaveError
        shutil.rmtree(folder, ignore_errors=True)
        raise kind(
            f"the state of version {version} cannot be written to {self.folder} ({reason}); "
            "free space there or correct its permissions, then start again"
        )

    def check(self, saved: SavedState) -> None:
        """Raise StartupError unless a saved state is the one that the ledger knows."""
        folder = self._root / saved.path
        if saved.sha256 is None:
            log.warning("the saved state has no SHA-256 in the ledger; it is loaded unchecked", state=saved.path)
        elif _digest(folder) != saved.sha256:
            raise StartupError(
                f"the trainer's state {folder} is not the one that was saved: its SHA-256 is not the ledger's "
                f"{saved.sha256[:12]}…; it was not loaded: restore it, or use a new root_dir"
            )

    def load(self, backend: DeepSpeedBackend, saved: SavedState, past: PastPolicy | None = None) -> JSON:
        """Load a state that was checked into the backend and `past`. Returns the algorithms' memory.

        Raises StartupError.
        """
        folder = self._root / saved.path
        read_state(backend, folder)
        if past is not None:
            past.load(folder)
        memory = folder / _MEMORY
        loaded: JSON = json.loads(memory.read_text(encoding="utf-8")) if memory.exists() else {}
        return loaded

    def clean(self, keep: Collection[str]) -> None:
        """Delete all states except those with these paths, relative to the root."""
        states = self.folder.glob("state-*")
        set_aside([folder for folder in states if str(folder.relative_to(self._root)) not in keep])
        sweep(self.folder)

    def newest_bytes(self) -> int:
        """Return the size of the newest state in bytes; 0 if there is none."""
        return size_of(max(self.folder.glob("state-*"), default=self.folder / "none"))

    def close(self) -> None:
        self._lock.close()


def _digest(folder: Path) -> str:
    """Return a SHA-256 over the names, sizes and contents of all files in a folder."""
    whole = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as stream:
            contents = hashlib.file_digest(stream, "sha256").hexdigest()
        whole.update(f"{file.relative_to(folder)} {file.stat().st_size} {contents}\n".encode())
    return whole.hexdigest()
