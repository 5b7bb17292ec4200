"""Disk space for the next version and its state, and the deletion of folders."""

from __future__ import annotations

import contextlib
import errno
import itertools
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from shared.errors import first_line
from shared.versions import fsync

GIB = 1024**3
_GONE = ".gone-"  # prefix of a folder that is being deleted


def lack_of_space(needs: dict[Path, int], min_free_bytes: int) -> str | None:
    """Return an error if these bytes in each folder would leave less than `min_free_bytes` free, or else None."""
    by_disk: dict[int, list[Path]] = {}
    for folder in needs:
        by_disk.setdefault(folder.stat().st_dev, []).append(folder)
    for folders in by_disk.values():
        needed = min_free_bytes + sum(needs[folder] for folder in folders)
        free = shutil.disk_usage(folders[0]).free
        if free < needed:
            return (
                f"{folders[0]} has {free / GIB:.2f} GiB free, and the next version needs {needed / GIB:.2f} GiB "
                f"({min_free_bytes / GIB:g} of it stay free: trainer.min_free_disk_gb); free space there"
            )
    return None


def size_of(folder: Path) -> int:
    """Return the size of all files in a folder in bytes; 0 if it does not exist."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def pauses_s(first: float) -> Iterator[float]:
    """Yield increasing pauses between attempts to write to a full disk, up to five minutes."""
    for doublings in itertools.count():
        yield min(first * 2 ** min(doublings, 20), 300.0)


def as_os_error(failure: Exception) -> OSError:
    """Convert an error of safetensors that wraps one of the operating system to an OSError."""
    number = re.search(r"os error (\d+)", str(failure))
    return OSError(int(number[1]) if number else errno.EIO, first_line(failure))


def set_aside(folders: Iterable[Path]) -> None:
    """Rename folders that are to be deleted, so that no reader takes a partly deleted one for complete."""
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):  # another trainer renamed it first
            folder.rename(folder.with_name(f"{_GONE}{folder.name}"))
            fsync(folder.parent)


def sweep(home: Path) -> None:
    """Delete the folders in `home` that were set aside, including those that a crash left."""
    for folder in home.glob(f"{_GONE}*"):
        shutil.rmtree(folder, ignore_errors=True)
