"""A benchmark that SIGTERM ends leaves no process behind."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.processes import REPOSITORY

START_S, END_S = 180.0, 120.0


@pytest.mark.parametrize(
    "arguments",
    [
        ["front_door", "--turns", "1", "--soak", "0", "--only", "flywheel"],
        ["crowds", "--turns", "1", "--only", "silent"],
        ["ledger", "--only", "record"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_benchmark_that_is_terminated_ends_its_processes(arguments):
    command = [sys.executable, "-m", f"benchmarks.{arguments[0]}", *arguments[1:]]
    started: dict[int, psutil.Process] = {}
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as program:
        try:
            assert program.stderr is not None
            if arguments[0] == "ledger":
                program.stderr.readline()  # its databases are complete
            deadline = time.monotonic() + START_S
            while not _are_up(started) and time.monotonic() < deadline and program.poll() is None:
                started |= {child.pid: child for child in psutil.Process(program.pid).children(recursive=True)}
                time.sleep(0.1)
            assert _are_up(started), program.communicate()[1]
            program.terminate()
            _, said = program.communicate(timeout=END_S)
            assert program.returncode == 1 and said.endswith(b"stopped\n")
            _, alive = psutil.wait_procs(started.values(), END_S)
            assert not alive
        finally:
            for process in started.values():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            program.kill()


def _are_up(started: dict[int, psutil.Process]) -> bool:
    """Whether a started process serves, so that it would go on if nobody ended it."""
    return any(process.is_running() and process.net_connections("tcp") for process in started.values())
