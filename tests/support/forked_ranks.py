"""A trainer's ranks as forks of the command that starts them: only the interface that `services.ranks` uses."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence

from services.cli import main
from shared.process import die_with_parent

PR_SET_NAME = 15
POLL_S = 0.01


class ForkedRank:
    """One rank; psutil names it `rank-N`."""

    def __init__(self, command: Sequence[str], environ: dict[str, str]) -> None:
        self.returncode: int | None = None
        self._pid = os.fork()
        if not self._pid:
            _run(command, environ)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        until = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"rank {self._pid}", timeout)
            time.sleep(POLL_S)
        return status

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self._pid, number)


def _run(command: Sequence[str], environ: dict[str, str]) -> None:
    """Do what `python -m services.cli COMMAND` does in its own process."""
    status = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(signal.SIGKILL)()
        os.environ.update(environ)
        ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank-{environ['RANK']}".encode())
        status = main(list(command))
    except BaseException:  # noqa: BLE001 — the end of a process: it must not return into its parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)
