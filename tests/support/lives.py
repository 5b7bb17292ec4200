"""Runs of Flywheel's commands, each a fork of one process that has imported everything: for tests that kill.

A trainer needs most of ten seconds to import PyTorch and DeepSpeed; here this happens once. Nothing else is shared: no
computation has begun before the fork. A trainer's ranks are forks of the command that starts them. Run as a module, it
reads a line of JSON for each request.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.processes import REPOSITORY, environment, wait_for

MODULES = (  # that a run would import
    "alembic",  # for a new ledger
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.stage3",  # this and the next two: with ZeRO, by each rank
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "distutils.ccompiler",  # by DeepSpeed
    "httpcore",
    "numpy.ctypeslib",
    "numpy.ma",
    "services.explorer",
    "services.trainer",
    "tests.support.faults",
    "trainer_service.agreement",
    "trainer_service.assembly",
    "trainer_service.base_version",
    "trainer_service.leftovers",
    "trainer_service.loop",
    "trainer_service.teachers",
    "uvloop",
)


class Lives:
    """The process that forks."""

    def __init__(self, log: Path, **environ: str) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.lives"],
                cwd=REPOSITORY,
                env=environment(**environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                process_group=0,  # a group, not a session; see decision 10
            )
        assert self._ask({"ready": True}) == 1

    def begin(self, arguments: list[str], log: Path, **environ: str) -> Life:
        """Run `flywheel ARGUMENTS`; append its output to `log`. environ: the faults (see tests.support.faults)."""
        log.touch()  # its output may be read before it has opened the file
        return Life(self, self._ask({"arguments": arguments, "log": str(log), "environ": environ}), log)

    def wait(self, pid: int, block: bool) -> int:
        """The exit status of a run, negative for a signal; 256 while it runs."""
        return self._ask({"pid": pid, "block": block})

    def _ask(self, question: dict[str, object]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def stop(self) -> None:
        with self._process:  # closes the pipes
            self._process.kill()


class Life:
    """One running command."""

    def __init__(self, lives: Lives, pid: int, log: Path) -> None:
        self.pid = pid
        self._lives, self._log = lives, log
        self._status = 256

    @property
    def alive(self) -> bool:
        if self._status == 256:
            self._status = self._lives.wait(self.pid, block=False)
        return self._status == 256

    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)
            self._status = self._lives.wait(self.pid, block=True)

    def stop(self) -> int:
        """Stop it with a signal. Returns its exit status."""
        if self.alive:
            os.kill(self.pid, signal.SIGTERM)
        return self.wait(240)

    def wait(self, timeout_s: float) -> int:
        """Its exit status, negative for a signal."""
        wait_for(lambda: not self.alive, "the end of a command", timeout_s, 0.02)
        return self._status

    def __enter__(self) -> Life:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _serve() -> None:
    """Import everything that a command may need, then fork on request."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of imports must not mix with answers
    import transformers
    from transformers import Qwen2ForCausalLM, Qwen2TokenizerFast, conversion_mapping  # noqa: F401 — see MODULES

    for module in MODULES:
        importlib.import_module(module)
    conversion_mapping.get_checkpoint_conversion_mapping("qwen2")  # the first call compiles the patterns of all models
    transformers.utils.logging.disable_progress_bar()
    gc.collect()
    gc.freeze()  # otherwise each run's garbage collections would visit, and so copy, all that was imported
    for line in sys.stdin:
        question = json.loads(line)
        if "arguments" in question:
            pid = os.fork()
            if not pid:
                _live(question["arguments"], question["log"], question["environ"])
            answer = pid
        elif "pid" in question:
            pid, status = os.waitpid(question["pid"], 0 if question["block"] else os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else 256
        else:
            answer = 1
        print(answer, file=answers, flush=True)


def _live(arguments: list[str], log: str, environ: dict[str, str]) -> None:
    from services import ranks
    from shared.process import die_with_parent
    from tests.support import faults
    from tests.support.forked_ranks import ForkedRank

    die_with_parent(signal.SIGKILL)()  # the parent ends with the tests, however they end
    ranks._start = ForkedRank  # type: ignore[assignment]
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, own in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, own)
    os.closerange(3, 64)
    os.environ.update(environ)
    tempfile.tempdir = None  # TMPDIR may differ
    status = 1
    try:
        status = faults.run(arguments)
    except BaseException:  # noqa: BLE001 — the end of a process: it must not return into its parent's loop
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
