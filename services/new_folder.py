"""A folder that a command writes: it appears only once it is complete."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import ConfigError
from shared.process import process_name
from shared.versions import fsync


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder beside `target`, which gets its name at the end of the block, or is removed after an error.

    An empty `target` is replaced. Raises ConfigError if it holds anything, is no folder, or is a mount point.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--to {target} is there already; name a new folder")
    target = target.resolve()  # `.` has no name
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".tmp-{target.name}-{process_name()}")
    if target.exists():
        _require_renamable(target, part)
    try:
        part.mkdir()
        yield part
        part.rename(target)
        fsync(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _require_renamable(folder: Path, free: Path) -> None:
    """Raise ConfigError for a mount point: the kernel does not replace it. free: a name that does not exist."""
    try:
        folder.rename(free)
    except OSError as exc:
        if exc.errno != errno.EBUSY:
            raise
        inside = folder / "flywheel"
        raise ConfigError(f"--to {folder} is a mount point; name a new folder in it, such as {inside}") from exc
    free.rename(folder)
