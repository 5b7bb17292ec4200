"""A benchmark that SIGTERM or SIGKILL ends leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.processes import REPOSITORY

START_S, END_S = 180.0, 60.0


PROGRAMS = {
    "front_door": ["front_door", "--turns", "1", "--soak", "0", "--only", "flywheel"],
    "crowds": ["crowds", "--turns", "1", "--only", "silent"],
    "ledger": ["ledger", "--only", "record"],
}
DEMO = """
import pathlib, socket, sys, time
with socket.create_server(("127.0.0.1", 0)):
    try:
        time.sleep(300)
    except KeyboardInterrupt:
        time.sleep(1)
        pathlib.Path(sys.argv[-1]).write_text("ended in order")
"""


@pytest.mark.parametrize("arguments", PROGRAMS.values(), ids=PROGRAMS)
def test_a_benchmark_that_is_terminated_ends_its_processes(arguments):
    with _running(arguments) as (program, started):
        program.terminate()
        _, said = program.communicate(timeout=END_S)
        assert program.returncode == 1 and said.endswith(b"stopped\n")
        _, alive = psutil.wait_procs(started.values(), END_S)
        assert not alive


@pytest.mark.parametrize("name", ["front_door", "crowds"])
def test_processes_of_a_benchmark_that_is_killed_end_too(name):
    with _running(PROGRAMS[name]) as (program, started):
        parts = [Path(part) for process in started.values() for part in process.cmdline()]
        config = next(part for part in parts if part.name == "flywheel.yaml")
        try:
            program.kill()
            _, alive = psutil.wait_procs(started.values(), END_S)
            assert not alive
        finally:
            shutil.rmtree(config.parents[1])  # the program's temporary folder


@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_the_demo_of_a_seed_is_interrupted_when_the_program_that_started_it_ends(end, tmp_path):
    """A stand-in for `flywheel demo`, in the working folder, says that it could end in order."""
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").touch()
    (tmp_path / "services" / "cli.py").write_text(DEMO)
    said = tmp_path / "said"
    arguments = ["example_seeds", "frozen_lake", str(tmp_path), "--seeds", "0", "--said", str(said)]
    with _running(arguments, tmp_path) as (program, started):
        getattr(program, end)()
        assert program.wait(END_S) == (1 if end == "terminate" else -signal.SIGKILL)
        assert end == "kill" or said.exists()  # a program that can wait for its demo does
        _, alive = psutil.wait_procs(started.values(), END_S)
        assert not alive and said.read_text() == "ended in order"


@contextlib.contextmanager
def _running(
    arguments: list[str], folder: Path = REPOSITORY
) -> Iterator[tuple[subprocess.Popen[bytes], dict[int, psutil.Process]]]:
    """A benchmark that runs in a folder, and its processes once one of them serves."""
    command = [sys.executable, "-m", f"benchmarks.{arguments[0]}", *arguments[1:]]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    started: dict[int, psutil.Process] = {}
    with subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as program:
        try:
            assert program.stderr is not None
            if arguments[0] == "ledger":
                program.stderr.readline()  # its databases are complete
            deadline = time.monotonic() + START_S
            while not _are_up(started) and time.monotonic() < deadline and program.poll() is None:
                started |= {child.pid: child for child in psutil.Process(program.pid).children(recursive=True)}
                time.sleep(0.1)
            assert _are_up(started), program.communicate()[1]
            yield program, started
        finally:
            for process in started.values():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            program.kill()


def _are_up(started: dict[int, psutil.Process]) -> bool:
    """Whether a started process serves, so that it would go on if nobody ended it."""
    return any(process.is_running() and process.net_connections("tcp") for process in started.values())
