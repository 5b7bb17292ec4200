"""The trainer's saved state: written before its rows become CONSUMED, found again after a crash.

A state lies in ROOT/trainer/NAME/state-000012/ and counts only when the trainer's row in the ledger names it; the same
transaction that names it marks its rows CONSUMED. What no row names is garbage. Private to the trainer: DeepSpeed's
checkpoints are pickles.
"""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import IO

from shared.errors import StartupError
from shared.ledger.connect import Ledger
from shared.ledger.queries import TrainerRow, find_trainer, highest_version_number
from shared.versions import fsync, remove_temporary_versions
from trainer_service.backends.deepspeed import DeepSpeedBackend


class StateStore:
    """The folder of one trainer's states. Holds a lock on it as long as it is open."""

    def __init__(self, root: Path, trainer: str) -> None:
        self._root = root
        self._folder = root / "trainer" / trainer
        self._lock = self._take_lock(trainer)

    def _take_lock(self, trainer: str) -> IO[str]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = (self._folder / "lock").open("w")
        except OSError as exc:
            raise StartupError(f"{self._folder} cannot be written ({exc.strerror}); mend its permissions") from exc
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            lock.close()
            raise StartupError(
                f"a trainer named {trainer!r} runs on this root_dir; end it, or change trainer.name"
            ) from exc
        return lock

    def save(self, backend: DeepSpeedBackend, version: int) -> str:
        """Write the state that belongs to a version, durably. Returns its path relative to the root."""
        folder = self._folder / f"state-{version:06d}"
        if folder.exists():  # a crash left it behind
            shutil.rmtree(folder)
        backend.save(folder)
        for path in sorted(folder.rglob("*"), reverse=True):
            fsync(path)
        fsync(folder)
        fsync(self._folder)
        return str(folder.relative_to(self._root))

    def load(self, backend: DeepSpeedBackend, state_path: str) -> None:
        """Bring the backend to a saved state."""
        backend.load(self._root / state_path)

    def clean(self, keep: str | None) -> None:
        """Delete every state but the one that the ledger names."""
        for folder in self._folder.glob("state-*"):
            if str(folder.relative_to(self._root)) != keep:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        self._lock.close()


def remove_garbage(root: Path, ledger: Ledger, name: str) -> TrainerRow | None:
    """Delete versions without a row that a crash left behind. Returns this trainer's row."""
    with ledger.read() as connection:
        row, highest = find_trainer(connection, name), highest_version_number(connection)
    remove_temporary_versions(root)
    for folder in (root / "versions").glob("v*"):
        if folder.name[1:].isdigit() and int(folder.name[1:]) > highest:
            shutil.rmtree(folder, ignore_errors=True)
    return row
