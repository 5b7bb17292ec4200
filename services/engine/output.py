"""What vLLM prints: kept in a file below root_dir, and searched for the reason when vLLM dies."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import IO

from shared.log import StageLogger

log = StageLogger("engine")


_MOST_LINES = 2000  # kept of what was printed last, and again of what vLLM said of its death
_NEAR_THE_END = 40  # lines

_ERROR = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception): .+|.*\berror: .+)")
# these only report that something else went wrong
_CONSEQUENCE = re.compile(r"EngineDeadError|Worker failed with error|Engine core initialization failed|EngineCore enc")
# the first thing said of a death: by the engine core itself, or by the API process that finds it dead
_DEATH = re.compile(
    r"EngineCore encountered a fatal error|EngineDeadError|[Ee]ngine core exited unexpectedly|died unexpectedly"
)
_OF_THE_API = "(APIServer"  # the process that answers requests; its errors are mostly of one request
_LOGGED = re.compile(r"^(?:\(\w+ pid=\d+\) )?[A-Z]+ \d\d-\d\d [\d:]+ (?:\[\S+\] )?")  # what vLLM's logger puts first


class EngineOutput:
    """vLLM's log: copied into a file below root_dir, and searched for the reason when vLLM dies.

    The log of the run before is kept beside it, under `previous`.
    """

    def __init__(self, stream: IO[bytes] | None, file: Path) -> None:
        assert stream is not None
        self.file = file
        self.previous = file.with_name(f"{file.stem}.previous{file.suffix}")
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._dying: list[str] = []  # from the first line of a death on: each request in flight adds a traceback to it
        self._thread = threading.Thread(target=self._drain, args=(stream,), name="vllm-output", daemon=True)
        self._thread.start()

    def _drain(self, stream: IO[bytes]) -> None:
        """Read to the end whatever happens to the file: a full pipe would hold vLLM up."""
        copy = self._open_copy()
        for raw in stream:
            self._keep(raw.decode(errors="replace").rstrip())
            if copy is None:
                continue
            try:
                copy.write(raw)
            except OSError as exc:
                log.warning("vLLM's log is not written any more", file=str(self.file), reason=exc.strerror)
                copy.close()
                copy = None
        if copy is not None:
            copy.close()

    def _keep(self, line: str) -> None:
        self._lines.append(line)
        if len(self._dying) < _MOST_LINES and (self._dying or _DEATH.search(line)):
            self._dying.append(line)

    def _open_copy(self) -> IO[bytes] | None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            if self.file.is_file():  # and no device
                self._keep_previous()
            return self.file.open("wb", buffering=0)
        except OSError as exc:
            log.warning("vLLM's log is not written", file=str(self.file), reason=exc.strerror)
            return None

    def _keep_previous(self) -> None:
        try:
            self.file.replace(self.previous)
        except OSError as exc:
            log.warning("vLLM's log of the run before is not kept", file=str(self.previous), reason=exc.strerror)

    def reason(self, *, in_service: bool) -> str:
        """The line of the log that best explains why vLLM ended, and where the log is.

        in_service: it had answered requests, whose errors do not end it.
        """
        self._thread.join(2.0)
        line = self._why_it_died() if in_service else self._why_it_did_not_start()
        return f"{line} (its whole log: {self.file}; once the engine has started again: {self.previous})"

    def _why_it_did_not_start(self) -> str:
        """The first error that is no consequence of another."""
        errors = _errors(self._lines)
        causes = [line for line in errors if not _CONSEQUENCE.search(line)]
        return (causes or errors or [*self._lines, "it printed nothing"])[0]

    def _why_it_died(self) -> str:
        """What the engine core or a worker died of, or who found it dead; else what ended the API process itself."""
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
    """The errors that these lines name. A validation error says more in the line after it."""
    return [
        match.group(1).strip() + (" " + after.strip() if "validation error" in line else "")
        for line, after in pairwise([*lines, ""])
        if (match := _ERROR.search(line))
    ]
