"""The end of vLLM: after a stop request, once the requests in flight have ended; in every other case at once.

The gate refuses new requests and counts those in flight. vLLM's own drain is for a signal that reaches vLLM as well, as
Ctrl-C and systemd send it: by itself, it would answer new requests with aborted replies, and take seconds to end when
nothing is in flight. A paused engine resumes in neither: what is in flight there is lost at the limit.
"""

from __future__ import annotations

import contextlib
import subprocess

import psutil

from services.engine.warmup import WarmingEngine
from shared.errors import EngineError
from shared.log import StageLogger

log = StageLogger("engine")

DRAIN_S = 12  # for requests in flight, by docs/explorer.md; longer than the grace of an explorer that stops, too
_REST_S = 2.0  # for the end of what has nothing to do
LONGEST_S = DRAIN_S + 2 * _REST_S  # less than `flywheel up` and the compose file give this process


def drain(serving: WarmingEngine) -> None:
    """Refuse new requests, and wait until those in flight have ended, or until the limit."""
    try:
        serving.close_gate(DRAIN_S)
    except EngineError as error:
        log.warning("ending vLLM; its requests in flight are lost, if any", reason=str(error))


def end(process: subprocess.Popen[bytes]) -> None:
    """End vLLM and all its processes at once. Those that outlive it become this one's children.

    Its engine core is killed: vLLM would wait until that has loaded the model, or has answered the warm-up. Python's
    resource trackers live on: they remove the shared memory of processes that were killed, and then end.
    """
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            if not _is_tracker(child):
                _kill(child)
        process.terminate()
        try:
            process.wait(_REST_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=_REST_S)
    for child in alive:
        _kill(child)


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
