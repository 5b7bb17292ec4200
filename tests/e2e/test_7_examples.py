"""The examples as a person runs them, under the Python of `make examples`, on the real engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Live
from tests.examples.program import start
from tests.support.forms import FULL
from tests.support.processes import REPOSITORY
from tests.support.servers import wait_until

AIMS = {
    "frozen_lake": ("reward", 0.30),
    "math": ("correctness", 0.35),
    "gsm8k": ("reward", 0.05),
    "alfworld": ("env_done", 0.20),
    "werewolf": ("wins", 0.15),
}
EXAMPLES = (*AIMS, "webshop", "email_search")
SHORT = {"runs_per_task": 4, "at_once": 6, "params": {"max_tokens": 64}}  # options of flywheel.learn; tool calls fit
RUNS, HELD_OUT = (8, 4) if FULL else (4, 1)  # more than a group of runs
VERSIONS = dict.fromkeys(EXAMPLES, 2 if FULL else 1) | {"alfworld": 2}  # with 2, learning goes on after the first


def play(
    name: str, root: Path, *options: str, limit_s: float, until: Callable[[], bool] | None = None
) -> dict[str, Any]:
    """The JSON line of an example."""
    printed = start("-m", f"examples.{name}", "--root", str(root), *options, limit_s=limit_s, until=until)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    assert found["failures"] == {}
    assert found["quarantined"] == {}
    assert (root / "report.html").stat().st_size > 1000
    assert len(json.loads((root / "report.json").read_text())["evaluations"]) == 2
    return found


def programs_with(argument: str) -> set[int]:
    """The ids of the processes that were started with this argument."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if argument.encode() in file.read_bytes().split(b"\0"):
                found.add(int(file.parent.name))
    return found


def test_who_ends_the_command_ends_the_example(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(240)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "services.cli", "demo", "frozen_lake", "--url", url, "--root", str(tmp_path)]
        demo = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            asked, _ = silent.accept()  # the example runs
            demo.terminate()
            demo.wait(60)
            with asked:
                asked.settimeout(60)
                while asked.recv(4096):
                    pass  # until the example closes its connection
            wait_until(lambda: not programs_with(str(tmp_path)))
        finally:
            for left in programs_with(str(tmp_path)):
                os.kill(left, signal.SIGKILL)


def learned_enough(live: Live, journal: Path, versions: int) -> Callable[[], bool]:
    """Whether more than RUNS have ended, and so many versions are in service that were not when learning began."""
    first: list[int] = []

    def holds() -> bool:
        if not journal.exists():
            return False
        version = int(live.status()["versions"]["serving"])
        first.append(version)
        runs = sum(b'"kind":"ended"' in line for line in journal.read_bytes().splitlines())
        return runs > RUNS and version >= first[0] + versions

    return holds


@pytest.mark.engine
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_evaluates_learns_and_reports_on_a_server_that_runs(name, tools_live: Live, tmp_path):
    options = ["--url", str(tools_live.http.base_url), "--minutes", "8", "--held-out", str(HELD_OUT)]
    if not FULL:
        (tmp_path / "learn.json").write_text(json.dumps(SHORT))
        options += ["--config", str(tmp_path / "learn.json")]
    enough = learned_enough(tools_live, tmp_path / "run" / "journal.jsonl", VERSIONS[name])
    found = play(name, tmp_path / "run", *options, limit_s=800, until=enough)
    assert found["after"]["version"] >= found["before"]["version"] + VERSIONS[name]
    assert found["before"]["failed"] == found["after"]["failed"] == 0
    assert found["runs"] > RUNS


@pytest.mark.engine
@pytest.mark.torture
@pytest.mark.skipif(not FULL, reason="minutes of learning: FLYWHEEL_TORTURE=full")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", AIMS)
def test_an_example_learns(name, seed, tmp_path):
    found = play(name, tmp_path / "run", "--seed", str(seed), limit_s=1100)
    metric, aim = AIMS[name]
    assert found["after"][metric] - found["before"][metric] >= aim


@pytest.mark.engine
@pytest.mark.torture
@pytest.mark.skipif(not FULL, reason="minutes of learning: FLYWHEEL_TORTURE=full")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", AIMS)
def test_nothing_is_learned_from_other_tasks_rewards(name, tmp_path):
    found = play(name, tmp_path / "run", "--shuffled", limit_s=1100)
    before, after = found["before"], found["after"]
    assert after["reward"] - before["reward"] <= 2 * (before["standard_error"] + after["standard_error"])
