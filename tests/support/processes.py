"""Flywheel's commands as real processes: started, watched through their log, ended or killed by process id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from services.cli import COMMANDS, build_parser
from shared.config import Config

REPOSITORY = Path(__file__).parents[2]


def write_config(config: Config, file: Path) -> Path:
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
    return file


def environment(**more: str) -> dict[str, str]:
    """This process's environment, without the rank's variables that a trainer in this process has set."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if name not in ranks} | more


def run_flywheel(*arguments: str, timeout_s: float = 120, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command and wait for its end."""
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *arguments],
        cwd=REPOSITORY,
        env=environment(**environ),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def run_here(config: Config, command: str, *arguments: str) -> int:
    """Run a command with this configuration in this process. Returns its exit status; raises its errors."""
    config.root.mkdir(parents=True, exist_ok=True)
    file = write_config(config, config.root / f"{command}.yaml")
    args = build_parser().parse_args([command, "-c", str(file), *arguments])
    return COMMANDS[args.command].run(args)


class Process:
    """One running command; its output goes to a file."""

    def __init__(self, arguments: Sequence[str], log: Path, module: str = "services.cli", **environ: str) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=REPOSITORY,
                env=environment(**environ),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                process_group=0,  # a group, not a session; see decision 10
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """Send SIGKILL to it and all that it started."""
        if self.alive:
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self, timeout_s: float = 240.0, number: signal.Signals = signal.SIGTERM) -> int:
        """Stop it with a signal. Returns its exit status."""
        self._process.send_signal(number)
        return self._process.wait(timeout_s)

    def wait(self, timeout_s: float) -> int:
        return self._process.wait(timeout_s)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def descendants(pid: int) -> list[int]:
    """The process ids of its descendants."""
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def wait_for(condition, what: str, timeout_s: float = 120.0, poll_s: float = 0.1):  # type: ignore[no-untyped-def]
    """Wait until the condition returns something true, and return that."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(poll_s)
    return result
