"""`flywheel engine`: start vLLM's own OpenAI server, warm it up, open it, and say plainly why when it cannot start.

vLLM runs as a child process and is reached over HTTP only. It starts on the newest version that verifies, so that an
engine that died comes back with what was in service.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import IO

import psutil

from services.engine.gate import TOKEN_VARIABLE
from services.engine.warmup import WarmingEngine
from shared.config import Config, EngineAddress, is_loopback
from shared.errors import ConfigError, EngineError, StartupError, VersionError
from shared.ledger.connect import Ledger
from shared.ledger.queries import list_versions
from shared.lifecycle import StopRequest, die_with_parent, require_free_port
from shared.log import StageLogger, configure_logging
from shared.versions import verify_version

log = StageLogger("engine")
STOP_TIMEOUT_S = 10.0


def run_engine(config: Config, name: str | None) -> int:
    """Run one engine until a signal or its death. Returns the exit status."""
    configure_logging("engine", config.log_level)
    address = _choose(config, name)
    stop = StopRequest().listen()
    host = address.host if is_loopback(address.host) else "0.0.0.0"
    require_free_port(host, address.port, f"the url of explorer.engines {address.name!r}")
    folder = prepare_model(config)
    if stop:
        return 0
    token = secrets.token_hex(16)
    log.info("starting vLLM", name=address.name, port=address.port, model=folder.name)
    process = subprocess.Popen(
        command_line(config, address, host, folder),
        env={**os.environ, **environment(config), TOKEN_VARIABLE: token},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with_parent(),  # noqa: PLW1509 — one prctl call, no lock
    )
    output = _Output(process.stdout, config.root / "logs" / f"vllm-{address.name}.log")
    try:
        warming = WarmingEngine(f"http://{_reachable(host)}:{address.port}", config.model.name, token)
        if not _start(process, warming, stop, config.engine.start_timeout_s, output):
            return 0
        log.info("ready", name=address.name, url=address.url)
        while process.poll() is None and not stop.wait(0.5):
            pass
        if not stop:
            raise StartupError(f"vLLM ended by itself with status {process.returncode}: {output.reason()}")
        return 0
    finally:
        _end(process)


def prepare_model(config: Config) -> Path:
    """The folder to serve: the newest version that verifies. Publishes version 0 if there is none."""
    from trainer_service.publish import ensure_base_version  # torch: only where it is needed

    ledger = Ledger.open(config.ledger_url)
    try:
        ensure_base_version(config, ledger)
        with ledger.read() as connection:
            rows = [row for row in list_versions(connection) if row.state != "REJECTED" and row.kind == "full"]
    finally:
        ledger.close()
    for row in reversed(rows):
        folder = config.root / row.path
        try:
            verify_version(folder)
        except VersionError as error:
            log.warning("version passed over", version=row.version, reason=str(error))
            continue
        return folder
    raise StartupError(f"no version in {config.root / 'versions'} verifies; restore one, or begin with a new root_dir")


def command_line(config: Config, address: EngineAddress, host: str, folder: Path) -> list[str]:
    """vLLM's arguments: what learning needs, then the user's own."""
    engine = config.engine
    arguments = {
        "--model": str(folder),
        "--served-model-name": config.model.name,
        "--host": host,
        "--port": str(address.port),
        "--dtype": saved_dtype(folder) if engine.dtype == "auto" else engine.dtype,
        "--logprobs-mode": "processed_logprobs",  # as sampled, at any temperature and top_p
        "--uvicorn-log-level": "warning",
        "--middleware": "services.engine.gate.WarmupGate",
    }
    flags = ["--enable-prefix-caching", "--disable-uvicorn-access-log"]
    if engine.max_model_len is not None:
        arguments["--max-model-len"] = str(engine.max_model_len)
    if engine.tool_parser is not None:
        arguments["--tool-call-parser"] = engine.tool_parser
        flags.append("--enable-auto-tool-choice")
    if config.model.kind == "lora":
        flags.append("--enable-lora")
    if runs_on_cpu():
        flags.append("--enforce-eager")
    pairs = [part for pair in arguments.items() for part in pair]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *pairs, *flags, *engine.extra_args]


def saved_dtype(folder: Path) -> str:
    """The weights' type as config.json says. (vLLM's own `auto` serves float32 models in half precision.)"""
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(said.get("dtype") or said.get("torch_dtype") or "auto")


def environment(config: Config) -> dict[str, str]:
    """vLLM's environment: its administrative routes, nothing from the network, and our gate importable."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": f"{config.engine.kv_cache_gb}",
        "VLLM_LOGGING_LEVEL": "INFO" if config.log_level == "DEBUG" else "WARNING",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
    }


def runs_on_cpu() -> bool:
    """Whether the installed vLLM is its CPU build. Raises StartupError when there is none."""
    for package, answer in (("vllm-cpu", True), ("vllm", False)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(package)
            return answer
    raise StartupError(
        "vLLM is not installed; run `make setup` for its CPU build, or pip install 'flywheel[vllm]' on a GPU"
    )


def _choose(config: Config, name: str | None) -> EngineAddress:
    engines = config.explorer.engines
    for address in engines:
        if name is None or address.name == name:
            return address
    known = ", ".join(address.name for address in engines)
    raise ConfigError(f"--name {name!r} is none of explorer.engines; choose one of: {known}")


def _reachable(host: str) -> str:
    return "127.0.0.1" if host == "0.0.0.0" else host


def _start(
    process: subprocess.Popen[bytes], warming: WarmingEngine, stop: StopRequest, timeout_s: float, output: _Output
) -> bool:
    """Wait until vLLM is healthy, warm it up, open it. False when asked to stop meanwhile. Raises StartupError."""
    started = time.monotonic()
    while not warming.is_healthy():
        if process.poll() is not None:
            raise StartupError(f"vLLM could not start (status {process.returncode}): {output.reason()}")
        if time.monotonic() - started > timeout_s:
            raise StartupError(
                f"vLLM was not healthy after {timeout_s:g} s; raise engine.start_timeout_s, or see its log"
            )
        if stop.wait(0.5):
            return False
    log.info("warming up", loaded_s=time.monotonic() - started)
    try:
        warming.warm_up()
        warming.open_gate()
    except EngineError as error:
        if stop:
            return False
        raise StartupError(f"the engine does not answer its warm-up ({error}): {output.reason()}") from error
    log.info("warm", seconds=time.monotonic() - started)
    return True


class _Output:
    """vLLM's log: into a file beside the ledger, and searched for the reason when vLLM dies."""

    _ERROR = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception): .+|.*\berror: .+)")
    # these only say that something else went wrong
    _CONSEQUENCE = re.compile(
        r"EngineDeadError|Worker failed with error|Engine core initialization failed|EngineCore enc"
    )

    def __init__(self, stream: IO[bytes] | None, file: Path) -> None:
        assert stream is not None
        self.file = file
        self._lines: deque[str] = deque(maxlen=2000)
        file.parent.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._drain, args=(stream,), name="vllm-output", daemon=True)
        self._thread.start()

    def _drain(self, stream: IO[bytes]) -> None:
        with self.file.open("wb") as copy:
            for raw in stream:
                copy.write(raw)
                copy.flush()
                self._lines.append(raw.decode(errors="replace").rstrip())

    def reason(self) -> str:
        """The line that most plainly says why vLLM ended, and where all of them are."""
        self._thread.join(2.0)
        lines = [*self._lines, ""]
        errors = [
            match.group(1).strip() + (" " + after.strip() if "validation error" in line else "")
            for line, after in pairwise(lines)
            if (match := self._ERROR.search(line))
        ]
        causes = [line for line in errors if not self._CONSEQUENCE.search(line)]
        return f"{(causes or errors or [*self._lines, 'it said nothing'])[0]} (its whole log: {self.file})"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End vLLM and every process it started."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(family, timeout=2.0)
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
