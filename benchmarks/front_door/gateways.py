"""The gateways as processes: their commands, cores, start and end. Independent of the loads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from shared.process import die_with_parent

REPOSITORY = Path(__file__).parents[2]
GATEWAY_CORE, OTHER_CORE = 0, 1
NAMES = ("flywheel", "before", "trinity", "litellm")


@dataclass(frozen=True)
class Gateway:
    """Answers chats. The engine itself, called directly, is a gateway without a process."""

    name: str
    port: int
    process: psutil.Process | None = None
    log: Path | None = None

    def cpu_s(self) -> float:
        """CPU seconds of the gateway and its children, user and system, including ended threads."""
        if self.process is None:
            return 0.0
        return sum(_cpu_s(process.pid) for process in [self.process, *self.process.children(recursive=True)])

    def resident_mb(self) -> float:
        assert self.process is not None
        return float(self.process.memory_info().rss) / 2**20

    def why_not_running(self) -> str | None:
        """The end of its log if its process has ended; None while it runs."""
        if self.process is None or self.process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None
        return self.log.read_text(errors="replace")[-2000:] if self.log else ""


def _cpu_s(pid: int) -> float:
    clock = ctypes.c_int()
    if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise ProcessLookupError(pid)
    return time.clock_gettime(clock.value)


def start_gateways(
    names: tuple[str, ...], peers: str | None, against: Path | None, upstream: int, folder: Path, stack: ExitStack
) -> list[Gateway]:
    """Start the engine, and the gateways of `names` whose files are given. The stack ends them."""
    makers: dict[str, Callable[[int], list[str]]] = {
        "flywheel": lambda port: _flywheel_command(upstream, port, folder / "flywheel"),
    }
    if against is not None:
        makers["before"] = lambda port: _flywheel_command(upstream, port, folder / "before")
    if peers is not None:
        makers["trinity"] = lambda port: _trinity_command(peers, upstream, port, folder)
        makers["litellm"] = lambda port: _litellm_command(peers, upstream, port, folder)
    gateways = [Gateway("direct", upstream)]
    for name, make in makers.items():
        if name in names:
            port, log = free_port(), folder / f"{name}.log"
            checkout = against if name == "before" and against is not None else REPOSITORY
            process = stack.enter_context(_running(make(port), GATEWAY_CORE, log, checkout))
            gateways.append(Gateway(name, port, process, log))
    return gateways


def start_upstream(
    n_prompt: int, n_reply: int, folder: Path, stack: ExitStack, module: str = "benchmarks.upstream"
) -> int:
    """Start the fake engine. Returns its port."""
    port = free_port()
    command = [sys.executable, "-m", module, str(port), str(n_prompt), str(n_reply)]
    stack.enter_context(_running(command, OTHER_CORE, folder / "upstream.log", REPOSITORY))
    return port


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _running(command: list[str], core: int, log: Path, checkout: Path) -> Iterator[psutil.Process]:
    """Run a process that is pinned to one core and imports our packages from one checkout; end it and its children."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout), "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,  # a group, not a session; see decision 10
            preexec_fn=_in_child(core),  # noqa: PLW1509 — two system calls, no lock
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _in_child(core: int) -> Callable[[], None]:
    die = die_with_parent()

    def in_child() -> None:
        die()
        os.sched_setaffinity(0, {core})

    return in_child


def _flywheel_command(upstream: int, port: int, folder: Path) -> list[str]:
    folder.mkdir()
    file = folder / "flywheel.yaml"
    engines = f'[{{name: e0, url: "http://127.0.0.1:{upstream}"}}]'
    file.write_text(
        f"root_dir: {folder}/data\nmodel: {{path: {folder}}}\nexplorer: {{port: {port}, engines: {engines}}}\n"
    )
    return [sys.executable, "-m", "services.cli", "explorer", "-c", str(file)]


def _trinity_command(peers: str, upstream: int, port: int, folder: Path) -> list[str]:
    url = f"http://127.0.0.1:{upstream}"
    return [peers, "-m", "benchmarks.peers.trinity_proxy", url, str(port), str(folder / "trinity.db")]


def _litellm_command(peers: str, upstream: int, port: int, folder: Path) -> list[str]:
    file = folder / "litellm.yaml"
    url = f"http://127.0.0.1:{upstream}/v1"
    file.write_text(
        "model_list:\n- model_name: agent\n  litellm_params: {model: openai/agent, api_key: none, "
        f'api_base: "{url}"}}\nlitellm_settings: {{telemetry: false}}\n'
        "general_settings: {dangerously_permit_weak_or_unset_master_key: true}\n"
    )
    script = str(Path(peers).with_name("litellm"))
    return [script, "--config", str(file), "--port", str(port), "--host", "127.0.0.1"]
