"""vLLM's output: copied to a file in root_dir, and searched for the reason when vLLM ends."""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import IO

from shared.log import StageLogger

log = StageLogger("engine")

_MOST_BYTES = 64 * 1024 * 1024  # of a log, before a new one begins
_MOST_LINES = 2000  # of the last output, and of the output about vLLM's end
_NEAR_THE_END = 40  # lines

_ERROR = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception): .+|.*\berror: .+)")
# these only report that something else failed
_CONSEQUENCE = re.compile(
    r"EngineDeadError|Worker failed with error|Engine core initialization failed|EngineCore enc|CalledProcessError|"
    r"Error raised in subprocess"
)
# the first report of a crash: by the engine core, or by the API process that finds it dead
_DEATH = re.compile(
    r"EngineCore encountered a fatal error|EngineDeadError|[Ee]ngine core exited unexpectedly|died unexpectedly"
)
_OF_THE_API = "(APIServer"  # the process that answers requests; its errors usually concern one request
_TORCHVISION = "No module named 'torchvision'"  # `make setup` leaves it out
_LOGGED = re.compile(r"^(?:\(\w+ pid=\d+\) )?[A-Z]+ \d\d-\d\d [\d:]+ (?:\[\S+\] )?")  # prefix of vLLM's logger


class EngineOutput:
    """The output of one run of vLLM. The log before it is kept next to it, as `previous`.

    That is the previous run's, or an earlier part of a long one's.
    """

    def __init__(self, stream: IO[bytes] | None, file: Path) -> None:
        assert stream is not None
        self.file = file
        self.previous = file.with_name(f"{file.stem}.previous{file.suffix}")
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._dying: list[str] = []  # from the first report of a crash on: each request in flight adds a traceback
        self._thread = threading.Thread(target=self._drain, args=(stream,), name="vllm-output", daemon=True)
        self._thread.start()

    def _drain(self, stream: IO[bytes]) -> None:
        """Read to the end, also after errors of the file: a full pipe would block vLLM."""
        copy, size = self._open_copy(), 0
        for raw in stream:
            self._store_line(raw.decode(errors="replace").rstrip())
            if copy is not None and size + len(raw) > _MOST_BYTES:
                copy.close()
                copy, size = self._open_copy(), 0
            if copy is None:
                continue
            try:
                size += copy.write(raw)
            except OSError as exc:
                log.warning("vLLM's log is not written any more", file=str(self.file), reason=exc.strerror)
                copy.close()
                copy = None
        if copy is not None:
            copy.close()

    def _store_line(self, line: str) -> None:
        self._lines.append(line)
        if len(self._dying) < _MOST_LINES and (self._dying or _DEATH.search(line)):
            self._dying.append(line)

    def _open_copy(self) -> IO[bytes] | None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            if self.file.is_file():  # not a device
                self._keep_previous()
            return self.file.open("ab", buffering=0)  # at its end, also after a rotation has emptied it
        except OSError as exc:
            log.warning("vLLM's log is not written", file=str(self.file), reason=exc.strerror)
            return None

    def _keep_previous(self) -> None:
        try:
            self.file.replace(self.previous)
        except OSError as exc:
            log.warning("vLLM's log of the run before is not kept", file=str(self.previous), reason=exc.strerror)
            os.truncate(self.file, 0)

    def reason(self, *, in_service: bool) -> str:
        """Return the line that best explains why vLLM ended, and the path of the log.

        in_service: it had answered requests, whose errors do not end it.
        """
        self._thread.join(2.0)
        line = self._death_cause() if in_service else self._startup_error()
        if _TORCHVISION in line:
            line += (
                "; vLLM imports it for models that also see images: install the build for your PyTorch, see README.md"
            )
        return f"{line} (its whole log: {self.file}; once the engine has started again: {self.previous})"

    def _startup_error(self) -> str:
        """Return the first error that is not a consequence of another."""
        errors = _errors(self._lines)
        causes = [line for line in errors if not _CONSEQUENCE.search(line)]
        return (causes or errors or [*self._lines, "it printed nothing"])[0]

    def _death_cause(self) -> str:
        """Return the error of the engine core or a worker, or the report of its death; else that of the API process."""
        if self._dying:
            errors = _errors([line for line in self._dying if not line.startswith(_OF_THE_API)])
            causes = [line for line in errors if not _CONSEQUENCE.search(line)]
            return (causes or errors or [_LOGGED.sub("", self._dying[0])])[0]
        printed = [line for line in self._lines if line]
        uncaught = _errors([line for line in printed[-_NEAR_THE_END:] if not _LOGGED.match(line)])
        if uncaught:
            return uncaught[-1]
        return f"its log names no error and ends with: {printed[-1]}" if printed else "it printed nothing"


def _errors(lines: Iterable[str]) -> list[str]:
    """Return the errors in these lines. The details of a validation error are in the line after it."""
    return [
        match.group(1).strip() + (" " + after.strip() if "validation error" in line else "")
        for line, after in pairwise([*lines, ""])
        if (match := _ERROR.search(line))
    ]
