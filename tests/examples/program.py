"""A program under the Python of `make examples`."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable

from tests.support.processes import REPOSITORY

PYTHON = REPOSITORY / ".venv-examples" / "bin" / "python"


def start(*arguments: str, limit_s: float, until: Callable[[], bool] | None = None) -> str:
    """What a program prints, which gets a Ctrl-C once `until` holds.

    An error shows the end of its output and, if it hangs, the stacks of its threads.
    """
    deadline = time.monotonic() + limit_s
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "agent_sdk")])
    process = subprocess.Popen(
        [str(PYTHON), *arguments],
        env={**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"},  # SIGABRT prints all threads' stacks
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        while True:
            try:
                printed, errors = process.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() >= deadline:
                    process.send_signal(signal.SIGABRT)
                elif until is not None and until():
                    process.send_signal(signal.SIGINT)
                    until = None
    assert process.returncode == 0, (printed + errors)[-16000:]
    return printed
