"""`flywheel up` for an example: makes the base model, writes the configuration, starts and stops the processes.

The engine and the trainer use the Python environment of `make setup`; the example itself may use another one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from examples.tiny_model import Recipe
from shared.config.load import ENV_PREFIX
from shared.errors import StartupError
from shared.process import die_with_parent

REPOSITORY = Path(__file__).parents[1]
MARKER = ".flywheel-example"
READY_TIMEOUT_S = 600.0
STOP_S = (60.0, 30.0)  # how long the processes may take to end after the first signal, and after the second
GIVE_UP_AFTER = 2  # failed process starts
FULL: Mapping[str, Any] = {"kind": "full"}


def product_python() -> str:
    """Return the Python executable that can import the engine and the trainer."""
    if importlib.util.find_spec("vllm") and importlib.util.find_spec("torch"):
        return sys.executable
    found = REPOSITORY / ".venv" / "bin" / "python"
    if not found.exists():
        raise StartupError(f"{found} is missing; run `make setup`, or give the address of a server: --url")
    return str(found)


def make_model(recipe: Callable[[], Recipe], folder: Path, root: Path) -> Path:
    """Return the base model's folder. Makes the model if it is not cached."""
    if not folder.exists():
        file = root / "recipe.json"
        recipe().dump(file)
        command = [product_python(), "-P", "-m", "examples.tiny_model", str(file), str(folder)]
        ended = subprocess.run(command, env=_environment(), check=False)
        if ended.returncode != 0:
            raise StartupError("the base model could not be made; what is written above says why")
    return folder


def make_root(root: Path, marker: str = MARKER) -> None:
    """Create an empty folder. Deletes a folder that an earlier run created, but no other. Raises StartupError.

    marker: name of the file that identifies a run's folder.
    """
    try:
        if root.exists() and any(root.iterdir()):
            if not (root / marker).exists():
                what = marker.removeprefix(".flywheel-")
                raise StartupError(
                    f"--root {str(root)!r} holds something that is no {what}; name an empty or new folder"
                )
            shutil.rmtree(root)
        root.mkdir(parents=True, exist_ok=True)
        (root / marker).touch()
    except OSError as exc:
        raise StartupError(f"--root {str(root)!r} cannot be emptied or made ({exc.strerror}); name another") from exc


def write_config(
    root: Path, model: Path, engine: Mapping[str, Any], trainer: Mapping[str, Any], versions: Mapping[str, Any] = FULL
) -> tuple[str, Path]:
    """Write the configuration file. Returns the explorer's address and the file.

    versions: `model.kind`, and with `lora` the adapter settings.
    """
    explorer_port, engine_port = free_ports(2)
    config = {
        "root_dir": "./data",
        "model": {"name": "agent", "path": str(model.resolve()), **versions},
        "explorer": {"port": explorer_port, "engines": [{"name": "e0", "url": f"http://127.0.0.1:{engine_port}"}]},
        "engine": {"dtype": "float32", "kv_cache_gb": 1, **engine},
        "trainer": dict(trainer),
    }
    file = root / "flywheel.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return f"http://127.0.0.1:{explorer_port}", file


def free_ports(count: int) -> list[int]:
    """Return ports on which no process listens now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def loopback_without_proxy() -> Iterator[None]:
    """Let HTTP clients that are created in the block reach 127.0.0.1 also if the environment names a proxy."""
    if not set(urllib.request.getproxies()) - {"no"}:
        yield  # some clients take the variable itself for a proxy
        return
    given = os.environ.get("no_proxy")
    without = given if given is not None else os.environ.get("NO_PROXY")
    os.environ["no_proxy"] = ",".join(filter(None, (without, "127.0.0.1")))  # comes before NO_PROXY
    try:
        yield
    finally:
        os.environ.pop("no_proxy")
        if given is not None:
            os.environ["no_proxy"] = given


@contextlib.contextmanager
def running(url: str, file: Path, *options: str, waiting: Callable[[int], None] = lambda _: None) -> Iterator[Running]:
    """Run `flywheel up` while the block runs. Yields when it is ready; interrupts it at the end. Raises StartupError.

    options: more arguments of the command. waiting: called every 10 seconds until it is ready, with the elapsed time.
    """
    log = file.with_name("flywheel.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [product_python(), "-P", "-m", "services.cli", "up", "-c", str(file), *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            process_group=0,  # a group, not a session; see decision 10
            env=_environment(),
            preexec_fn=die_with_parent(),  # noqa: PLW1509 — one prctl call, no lock
        )
    found = Running(process, log)
    try:
        with loopback_without_proxy():
            _wait_ready(url, found, waiting)
            yield found
    finally:
        for wait_s in STOP_S:  # the second signal kills what has not ended
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
                break
        else:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass(frozen=True, slots=True)
class Running:
    """The `flywheel up` process and its log file."""

    process: subprocess.Popen[bytes]
    log: Path

    def require_alive(self) -> None:
        """Raise StartupError if the process has ended."""
        if self.process.poll() is not None:
            end = "\n  ".join(self.lines()[-8:])
            raise StartupError(f"flywheel up has ended; the end of its log says why:\n  {end}")

    def lines(self) -> list[str]:
        """Return the lines of the log."""
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()


def _wait_ready(url: str, found: Running, waiting: Callable[[int], None]) -> None:
    began, last_said = time.monotonic(), 0
    while True:
        found.require_alive()
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        waited_s = time.monotonic() - began
        if waited_s > READY_TIMEOUT_S:
            raise StartupError(f"not ready after {READY_TIMEOUT_S:g} s; see {found.log}")
        errors = [line for line in found.lines() if "flywheel: " in line]
        if len(errors) >= GIVE_UP_AFTER:
            raise StartupError(f"a process cannot start: {errors[-1].partition('flywheel: ')[2]}")
        if int(waited_s) // 10 > last_said:
            last_said = int(waited_s) // 10
            waiting(10 * last_said)
        time.sleep(0.5)


def _environment() -> dict[str, str]:
    """Return the environment without variables that would override the example's own file."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    path = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(path)}
