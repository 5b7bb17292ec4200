"""`flywheel up`: engines, explorer and trainer as separate processes on this machine, under one supervisor.

Ordered start (engines begin first, they take longest), one merged log, restart with backoff, and an end that leaves no
process behind: each child leads a process group of its own, which is ended as a whole, and the kernel ends the child if
this supervisor dies.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from shared.config import Config, is_loopback
from shared.errors import StartupError
from shared.ledger.connect import Ledger
from shared.lifecycle import StopRequest, die_with_parent, require_free_port
from shared.log import StageLogger, configure_logging

log = StageLogger("local")

BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
STABLE_AFTER_S = 60.0  # a process that lived this long begins again at the shortest backoff
STOP_TIMEOUT_S = 20.0


@dataclass(slots=True)
class Child:
    """One supervised process."""

    name: str
    arguments: list[str]
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0  # time.monotonic()
    failures: int = 0
    restart_at: float | None = None
    readers: list[threading.Thread] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


def run_local(config: Config, file: Path, without: Sequence[str] = ()) -> int:
    """Run everything, but for the parts left out, until Ctrl-C or SIGTERM. Returns the exit status."""
    configure_logging("up", config.log_level)
    stop = StopRequest().listen()
    engines = [e for e in config.explorer.engines if is_loopback(e.host) and "engines" not in without]
    for engine in engines:
        require_free_port(engine.host, engine.port, f"the url of explorer.engines {engine.name!r}")
    require_free_port(config.explorer.host, config.explorer.port, "explorer.port")
    if not (Path(config.model.path) / "config.json").exists():
        raise StartupError(
            f"model.path={config.model.path!r} is no model folder (no config.json in it); correct model.path"
        )
    Ledger.open(config.ledger_url).close()  # away or not ours: say it now, once, and not three times a second
    children = [Child(f"engine-{e.name}", ["engine", "-c", str(file), "--name", e.name]) for e in engines]
    children += [Child(name, [name, "-c", str(file)]) for name in ("explorer", "trainer") if name not in without]
    return Supervisor(children, stop).run()


class Supervisor:
    """Starts, watches, restarts and ends children."""

    def __init__(self, children: list[Child], stop: StopRequest) -> None:
        self._children = children
        self._stop = stop
        self._width = max(len(child.name) for child in children)

    def run(self) -> int:
        """Until asked to stop, or until a child refuses its configuration (exit status 2: restarting cannot help)."""
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
            [sys.executable, "-m", "services.cli", *child.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,  # a group, not a session; see decision 10
            preexec_fn=die_with_parent(),  # noqa: PLW1509 — one prctl call, no lock
            env={**os.environ, "FLYWHEEL_LOG_PLAIN": "1", "PYTHONUNBUFFERED": "1"},
        )
        child.started_at, child.restart_at = time.monotonic(), None
        assert child.process.stdout is not None
        reader = threading.Thread(target=self._copy_log, args=(child.name, child.process.stdout), daemon=True)
        reader.start()
        child.readers = [reader]
        log.info("started", process=child.name, pid=child.process.pid)

    def _copy_log(self, name: str, stream: IO[bytes]) -> None:
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip()
                sys.stderr.write(f"{time.strftime('%H:%M:%S')} {name:<{self._width}} {line}\n")
                sys.stderr.flush()

    def _watch(self, child: Child) -> int | None:
        """Notice an end, plan and carry out the restart. Returns the exit status of a child that has just ended."""
        if child.alive:
            return None
        now = time.monotonic()
        if child.restart_at is not None:
            if now >= child.restart_at:
                self._start(child)
            return None
        assert child.process is not None
        _end_group(child.process, signal.SIGKILL)  # whatever it started must not outlive it
        status = child.process.returncode
        if status == 2:
            return status
        child.failures = 1 if now - child.started_at > STABLE_AFTER_S else child.failures + 1
        wait_s = BACKOFF_S[min(child.failures, len(BACKOFF_S)) - 1]
        child.restart_at = now + wait_s
        log.warning("ended by itself; restarting", process=child.name, status=status, in_s=wait_s)
        return status

    def _end_all(self) -> None:
        """Explorer and trainer first, engines when those have ended: what drains still needs its engine."""
        log.info("stopping")
        engines = [child for child in self._children if child.arguments[0] == "engine"]
        for stage in ([child for child in self._children if child not in engines], engines):
            _end_together(stage)
        for child in self._children:
            for reader in child.readers:
                reader.join(1.0)
        log.info("stopped")


def _end_together(children: list[Child]) -> None:
    """Ask all of them, wait for all of them, then kill whatever is left of their groups."""
    for child in children:
        if child.alive and child.process is not None:
            child.process.terminate()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for child in children:
        if child.process is None:
            continue
        try:
            child.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("did not stop in time; killed", process=child.name)
        _end_group(child.process, signal.SIGKILL)
        child.process.wait()


def _end_group(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return  # the group is empty: all of it has ended
