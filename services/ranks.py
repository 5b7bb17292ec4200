"""The ranks of a trainer on this machine: one process each; when one ends, all end.

Their environment is that of `torchrun --standalone --max-restarts 0`. torchrun itself would hide their exit status, by
which a supervisor recognizes a rejected configuration, and print a traceback after the one-line error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from shared.errors import ConfigError
from shared.log import StageLogger, configure_logging
from shared.ports import free_port
from shared.process import die_with_parent, import_path
from shared.stop_request import StopRequest

log = StageLogger("trainer")
END_TIMEOUT_S = 10.0  # from the end of one rank until the others are killed

Rank = subprocess.Popen[bytes]


def is_a_rank() -> bool:
    """Whether this process was started as a rank: by `run_ranks`, torchrun or DeepSpeed's launcher."""
    return "WORLD_SIZE" in os.environ


def require_ranks(size: int) -> None:
    """On a rank: raise ConfigError if its job has fewer ranks than the configuration."""
    started = os.environ["WORLD_SIZE"]
    if started.isdigit() and int(started) < size:
        raise ConfigError(
            f"WORLD_SIZE={started}, and trainer.ranks={size}: unset WORLD_SIZE, so that `flywheel trainer` starts the "
            "ranks, or let torchrun start as many"
        )


def end_with_torchrun() -> None:
    """Let the kernel end this rank with its torchrun, because no other process would if torchrun is killed."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGKILL)()


def run_ranks(size: int, command: list[str], log_level: str) -> int:
    """Run `flywheel COMMAND` on each rank until all have ended.

    Returns the exit status: 0, 2 if a rank rejected the configuration, or 1.
    """
    configure_logging("trainer", log_level)
    stop = StopRequest().listen()
    job = {"WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{size}"}
    job["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings are stack traces
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    ranks = [_start(command, {**job, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}) for rank in range(size)]
    try:
        while not stop.wait(0.2) and not _any_ended(ranks):
            pass
        if stop:
            ranks[0].terminate()  # the others end on its order
            ranks[0].wait()
        _wait_for_all(ranks)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return _exit_status(ranks)


def _start(command: list[str], environ: dict[str, str]) -> Rank:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "services.cli", *command],
        env={**os.environ, **import_path(), **environ},
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with_parent(signal.SIGKILL),  # noqa: PLW1509 — one prctl call, no lock
    )


def _any_ended(ranks: list[Rank]) -> bool:
    ended = [number for number, process in enumerate(ranks) if process.poll() is not None]
    if ended:
        log.warning("a rank has ended; all end", rank=ended[0], status=ranks[ended[0]].returncode)
    return bool(ended)


def _wait_for_all(ranks: list[Rank]) -> None:
    """Give the remaining ranks time to log their reasons."""
    until = time.monotonic() + END_TIMEOUT_S
    for process in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))


def _exit_status(ranks: list[Rank]) -> int:
    statuses = {process.returncode for process in ranks}
    return 2 if 2 in statuses else int(statuses != {0})
