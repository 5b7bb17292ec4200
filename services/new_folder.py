"""A folder that a command writes: it appears only once it is complete."""

from __future__ import annotations

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

    Raises ConfigError if `target` exists and is no empty folder.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--to {target} is there already; name a new folder")
    target = target.resolve()  # `.` has no name
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".tmp-{target.name}-{process_name()}")
    try:
        part.mkdir()
        yield part
        if target.exists():
            target.rmdir()
        part.rename(target)
        fsync(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
