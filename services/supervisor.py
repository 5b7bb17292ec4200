"""Supervises several `flywheel` processes on one machine: the parts of `flywheel up`, or an explorer's workers.

It starts the children in order, merges their logs, restarts them with backoff, and leaves no process behind: each child
leads its own process group, which is killed as a whole, and the kernel ends the child if the supervisor dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import IO

from shared.log import StageLogger
from shared.process import die_with_parent, import_path
from shared.stop_request import StopRequest

log = StageLogger("up")

BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
STABLE_AFTER_S = 60.0  # a process that ran this long restarts with the shortest backoff
STOP_TIMEOUT_S = 20.0
REPEATED_S = 1.0  # a signal this soon after the first one is the same request: some launchers send it twice


@dataclass(slots=True)
class Child:
    """One supervised process."""

    name: str
    arguments: list[str]
    stop_timeout_s: float = STOP_TIMEOUT_S  # from SIGTERM until it is killed
    death_signal: int = signal.SIGTERM  # sent by the kernel if the supervisor dies
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0  # time.monotonic()
    failures: int = 0
    restart_at: float | None = None
    reader: threading.Thread | None = None  # of its output

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Supervisor:
    """Starts, monitors, restarts and stops children."""

    def __init__(self, children: list[Child], stop: StopRequest, kill: StopRequest | None = None) -> None:
        """kill: a request to kill the children that have not ended after `stop`."""
        self._children = children
        self._stop, self._kill = stop, kill
        self._width = max(len(child.name) for child in children)

    def run(self) -> int:
        """Run until a stop is requested, or until a child exits with status 2: a restart cannot fix its configuration.

        Returns the exit status.
        """
        status = 0
        try:
            for child in self._children:
                self._start(child)
            while not self._stop.wait(0.2):
                refused = [child for child in self._children if self._watch(child) == 2]
                if refused:
                    log.error("configuration refused; stopping all", process=refused[0].name)
                    status = 2
                    break
        finally:
            self._end_all()
        return status

    def _start(self, child: Child) -> None:
        child.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "services.cli", *child.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,  # a group, not a session; see decision 10
            preexec_fn=die_with_parent(child.death_signal),  # noqa: PLW1509 — one prctl call, no lock
            env={**os.environ, **import_path(), "FLYWHEEL_LOG_PLAIN": "1", "PYTHONUNBUFFERED": "1"},
        )
        child.started_at, child.restart_at = time.monotonic(), None
        assert child.process.stdout is not None
        child.reader = threading.Thread(target=self._copy_log, args=(child.name, child.process.stdout), daemon=True)
        child.reader.start()
        log.info("started", process=child.name, pid=child.process.pid)

    def _copy_log(self, name: str, stream: IO[bytes]) -> None:
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip()
                with contextlib.suppress(OSError):  # closed stderr or a full disk: the child must not notice
                    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {name:<{self._width}} {line}\n")
                    sys.stderr.flush()

    def _watch(self, child: Child) -> int | None:
        """Detect a child's end, schedule its restart, and restart it. Returns its exit status if it has just ended."""
        if child.alive:
            return None
        now = time.monotonic()
        if child.restart_at is not None:
            if now >= child.restart_at:
                self._start(child)
            return None
        assert child.process is not None
        _end_group(child.process, signal.SIGKILL)  # and the processes that it started
        status = child.process.returncode
        if status == 2:
            return status
        child.failures = 1 if now - child.started_at > STABLE_AFTER_S else child.failures + 1
        wait_s = BACKOFF_S[min(child.failures, len(BACKOFF_S)) - 1]
        child.restart_at = now + wait_s
        log.warning("ended by itself; restarting", process=child.name, **_how_it_ended(status), in_s=wait_s)
        return status

    def _end_all(self) -> None:
        """Stop explorer and trainer first, then the engines: draining requests still need an engine."""
        log.info("stopping" if self._kill is None else "stopping; a second signal kills what has not ended")
        engines = [child for child in self._children if child.arguments[0] == "engine"]
        for stage in ([child for child in self._children if child not in engines], engines):
            _end_together(stage, self._kill)
        for child in self._children:
            if child.reader is not None:
                child.reader.join(1.0)
        log.info("stopped")


def _end_together(children: list[Child], kill: StopRequest | None) -> None:
    """Send SIGTERM to all of them, wait for each until its limit or `kill`, then kill the rest of their groups."""
    for child in children:
        if child.alive and child.process is not None:
            child.process.terminate()
    began = time.monotonic()
    for child in sorted(children, key=lambda child: child.stop_timeout_s):
        if child.process is None:
            continue
        while child.alive and not kill and time.monotonic() - began < child.stop_timeout_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(0.1)
        if child.alive:
            log.warning("killed by a second signal" if kill else "did not stop in time; killed", process=child.name)
        _end_group(child.process, signal.SIGKILL)
        child.process.wait()


def _how_it_ended(status: int) -> dict[str, object]:
    """Return the field that says it in the log: the signal's name, or the exit status."""
    try:
        return {"signal": signal.Signals(-status).name}
    except ValueError:  # it exited, or the signal has no name
        return {"status": status}


def _end_group(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return  # the whole group has ended


def listen_for_two(stop: StopRequest, kill: StopRequest) -> None:
    """Let a first SIGTERM or SIGINT set `stop`, and a second one `kill` (main thread only)."""
    times: list[float] = []

    def note(*_: object) -> None:
        times.append(time.monotonic())
        (stop if len(times) == 1 or times[-1] - times[0] < REPEATED_S else kill).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
