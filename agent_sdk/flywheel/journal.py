"""The journal of learn: ended runs and sent feedback, so that learn can continue after kill -9.

A run is journaled as ended, with its feedback, before anything is sent. So a run either has no line, and its rows are
never rewarded; or its feedback is known, including the key, and may be sent again without counting twice. A thread
writes: all queued lines share one fsync. A truncated last line counts as not written.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import queue
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from flywheel.errors import JournalMismatch

if sys.platform != "win32":
    import fcntl

FORMAT = 1
_Waiting = tuple[bytes, "asyncio.Future[None] | None"]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a journal, oldest first; a truncated last line is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError:
                return  # the disk lost the end: later lines were never acknowledged


class Journal:
    """The journal of one folder. Raises JournalMismatch if it is of other work, or another learn uses the folder.

    `work` identifies the work; `session` counts the starts; `token` distinguishes its runs from those of other
    journals. From earlier starts: `ended`, the places of ended runs; `unsent`, lines whose feedback may not have
    arrived; `uncommitted`, tasks of ended runs that may not be committed; `evaluations`; and `ledger`, when version 0
    of their ledger was made, if it was known.
    """

    def __init__(self, path: Path, work: dict[str, Any], resume: bool) -> None:
        self.path = path
        self.ended: set[str] = set()
        self.unsent: dict[str, dict[str, Any]] = {}
        self.uncommitted: set[str] = set()
        self.evaluations: list[dict[str, Any]] = []
        self.ledger: float | None = None
        self.session = 1
        self.token = ""  # empty in journals from before tokens existed
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _Lock(path)
        try:
            whole = self._read(work, resume)
            self._file: BinaryIO = path.open("r+b" if path.exists() else "wb")
        except BaseException:
            self._lock.close()
            raise
        self._file.truncate(whole)
        self._file.seek(whole)
        self._lines: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="flywheel-journal", daemon=True)
        self._thread.start()
        if whole == 0:
            self.token = uuid.uuid4().hex[:8]
            self.note({"kind": "head", "format": FORMAT, "work": work, "token": self.token})
        self.note({"kind": "session", "number": self.session})

    def _read(self, work: dict[str, Any], resume: bool) -> int:
        """Read the existing lines. Returns the bytes of the complete ones."""
        whole = 0
        for number, line in enumerate(read_lines(self.path)):
            if number == 0:
                self._check(line, work, resume)
            whole += len(_encode(line))
            self._apply(line)
        return whole

    def _check(self, head: dict[str, Any], work: dict[str, Any], resume: bool) -> None:
        if not resume:
            raise JournalMismatch(f"{self.path} exists and resume is false: give another folder, or delete this one")
        known = head.get("work") or {}
        if differs := sorted(name for name in {*known, *work} if known.get(name) != work.get(name)):
            what = "; ".join(f"{name}: {known.get(name)!r} there, {work.get(name)!r} here" for name in differs)
            raise JournalMismatch(f"{self.path} is of other work ({what}): give another folder, or the same work")

    def _apply(self, line: dict[str, Any]) -> None:
        kind, place = line.get("kind"), line.get("place", "")
        if kind == "head":
            self.token = line.get("token", "")
        elif kind == "session":
            self.session = line["number"] + 1
        elif kind == "ended":
            self.ended.add(place)
            self.unsent[place] = line
            self.uncommitted.add(place.rpartition("#")[0])
        elif kind == "committed":
            self.uncommitted.discard(line["task_id"])
        elif kind == "sent":
            self.unsent.pop(place, None)
        elif kind == "void":
            self.ended.discard(place)
            self.unsent.pop(place, None)
        elif kind == "evaluation":
            self.evaluations.append(line)
        elif kind == "ledger":
            self.ledger = line["made"]

    def check_ledger(self, made: float | None, url: str) -> None:
        """Note whose ledger has the runs. Raises JournalMismatch if earlier starts had another one.

        made: when its version 0 was made; None: it has none, which says nothing.
        """
        if made is None or made == self.ledger:
            return
        if self.ledger is not None:
            raise JournalMismatch(
                f"the runs of {self.path} are in the ledger of another server than {url}, whose version 0 was made at "
                f"{self.ledger!r}, not at {made!r} (Unix seconds): give another folder, or the server of these runs"
            )
        self.ledger = made
        self.note({"kind": "ledger", "made": made})

    def note(self, line: dict[str, Any]) -> None:
        """Queue a line whose loss would do no harm."""
        self._lines.put((_encode(line), None))

    async def write(self, line: dict[str, Any]) -> None:
        """Write a line; it is durable when this returns. Raises ValueError if the journal is closed."""
        if not self._thread.is_alive():
            raise ValueError(f"{self.path} is closed")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.put((_encode(line), done))
        await done

    def close(self) -> None:
        """Write queued lines, and stop; a second call does nothing."""
        if self._thread.is_alive():
            self._lines.put(None)
            self._thread.join()
        self._file.close()
        self._lock.close()

    def _write(self) -> None:
        while True:
            batch = [self._lines.get()]
            while not self._lines.empty():
                batch.append(self._lines.get())
            lines = [line for line in batch if line is not None]
            error: OSError | None = None
            try:
                self._file.write(b"".join(line for line, _ in lines))
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as exc:
                error = exc
            for _, done in lines:
                if done is not None:
                    done.get_loop().call_soon_threadsafe(_settle, done, error)
            if len(lines) < len(batch):
                return


class _Lock:
    """Keeps others from a journal: other processes, by a lock that ends with this one, and other learns of this one."""

    _held: ClassVar[dict[str, _Lock]] = {}  # of this process, where a file's lock keeps nobody out

    def __init__(self, path: Path) -> None:
        self._name = os.path.realpath(path)
        if self._held.setdefault(self._name, self) is not self:
            raise _in_use(path)
        try:
            self._file = path.with_suffix(".lock").open("ab")
        except OSError:
            del self._held[self._name]
            raise
        try:
            if sys.platform != "win32":
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in (errno.EACCES, errno.EAGAIN):  # else the file system has no locks
                self.close()
                raise _in_use(path) from exc

    def close(self) -> None:
        """Let others use the journal; a second call does nothing."""
        self._file.close()
        if self._held.get(self._name) is self:
            del self._held[self._name]


def _in_use(path: Path) -> JournalMismatch:
    return JournalMismatch(f"{path} is in use by another learn: wait for its end, or give another folder")


def _settle(done: asyncio.Future[None], error: OSError | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _encode(line: dict[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"
