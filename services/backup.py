"""`flywheel backup`: a copy of the ledger, of the versions and of the trainers' states, all of one moment.

Chats and training go on, and so does the deletion of what is not kept. So the folders that a snapshot of the ledger
names get hard links beside them at once, and are copied from there: what is deleted meanwhile is in the copy. The copy
is a root folder with its own SQLite ledger, whatever database the original has.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Connection

from services.new_folder import new_folder
from shared.config import Config
from shared.errors import StartupError, is_full
from shared.ledger.connect import Ledger
from shared.ledger.migrate import copy_ledger
from shared.ledger.queries import kept_versions, list_states, list_trainers
from shared.versions import fsync

LINKS = ".backup"  # beside the folders to copy
LOCK = ".backup.lock"  # in versions/
FIGURES = "trainer/*/figures*.jsonl"  # of the trainers' updates
_PAUSE_S = 0.1  # before the next snapshot, if a folder has been deleted
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

Progress = Callable[[str, int, int], None]  # (what is copied, units done, all units)


class Moment(NamedTuple):
    """What the ledger named in a snapshot."""

    rows: int  # of all tables
    folders: dict[str, Path]  # of versions and states: the path relative to the root, and where its files are linked
    missing: list[str]  # paths of folders that do not exist


def back_up(config: Config, to: Path, progress: Progress) -> Moment:
    """Copy everything to a new folder, which exists only once it is complete and durable.

    progress: for a table, rows; for folders, their number. Raises ConfigError, StartupError, LedgerError and OSError.
    """
    with new_folder(to) as part:
        with closing(Ledger.open(config.ledger_url, create=False)) as ledger, _only_backup(config.root):
            moment = _copy_ledger(ledger, config, part, progress)
            for number, (path, source) in enumerate(moment.folders.items(), start=1):
                _copy_folder(source, part / path)
                progress("versions and states", number, len(moment.folders))
        for file in config.root.glob(FIGURES):
            copy = part / file.relative_to(config.root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copy)
        for one in (*part.rglob("*"), part):
            fsync(one)
    return moment


@contextlib.contextmanager
def _only_backup(root: Path) -> Iterator[None]:
    """Raise StartupError if another backup of this root folder runs. Removes the links that a killed one left."""
    (root / "versions").mkdir(parents=True, exist_ok=True)
    with (root / "versions" / LOCK).open("w") as lock:  # on NFS, a folder cannot be locked
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartupError(f"another backup of {root} runs; wait for its end") from None
        try:
            _remove_links(root)
            yield
        finally:
            _remove_links(root)


def _remove_links(root: Path) -> None:
    for links in (root / "versions" / LINKS, *root.glob(f"trainer/*/{LINKS}")):
        if links.exists():
            shutil.rmtree(links)


def _copy_ledger(ledger: Ledger, config: Config, part: Path, progress: Progress) -> Moment:
    """Link the folders that a snapshot names, and copy its rows.

    If folders were deleted between snapshot and links, it takes another snapshot, which does not name them.
    """
    root, missing = config.root, list[str]()
    copy = config.model_copy(update={"root_dir": str(part), "database_url": None})
    while True:
        with ledger.read() as connection:
            paths = _named(connection)
            folders = {path: found for path in paths if (found := _link(root, path)) is not None}
            absent = [path for path in paths if path not in folders]
            if set(absent) <= set(missing):  # they are no longer being deleted
                return Moment(_copy_rows(connection, copy.ledger_url, progress), folders, absent)
        missing = absent
        _remove_links(root)
        time.sleep(_PAUSE_S)


def _named(connection: Connection) -> list[str]:
    """Return the paths, relative to the root, of the versions and states that exist in this snapshot."""
    paths = [row.path for row in kept_versions(connection) if row.has_files]
    for trainer in list_trainers(connection):
        states = {state.path for state in list_states(connection, trainer.name)}
        paths += sorted(states | ({trainer.state_path} if trainer.state_path is not None else set()))
    return paths


def _link(root: Path, path: str) -> Path | None:
    """Link a folder's files into a folder beside it, and return that one; None if the folder does not exist.

    A file system without hard links: returns the folder itself.
    """
    source = root / path
    target = source.parent / LINKS / source.name
    try:
        _each_file(os.link, source, target)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in _NO_LINKS:
            return source
        raise
    return target


def _copy_rows(snapshot: Connection, url: str, progress: Progress) -> int:
    with closing(Ledger.open(url)) as ledger, ledger.write() as connection:
        return sum(copy_ledger(snapshot, connection, progress, writers_wait=False).values())


def _copy_folder(source: Path, target: Path) -> None:
    try:
        _each_file(shutil.copy2, source, target)
    except FileNotFoundError as error:
        raise StartupError(
            f"{source} was deleted while it was copied, and its file system has no hard links; "
            "stop the trainers, and start again"
        ) from error
    except OSError as error:
        if not is_full(error):
            raise
        raise StartupError(f"{target} cannot be written ({error.strerror}); free space there") from error


def _each_file(make: Callable[[Path, Path], object], source: Path, target: Path) -> None:
    """Call make(file, its place in `target`) for all files of a folder. Raises FileNotFoundError if it is deleted."""
    for where, _, names in os.walk(source, onerror=_raise):
        folder = target / Path(where).relative_to(source)
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            make(Path(where) / name, folder / name)


def _raise(error: OSError) -> None:
    raise error
