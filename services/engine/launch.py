"""`flywheel engine`: starts vLLM's OpenAI server, warms it up, opens it, and reports why it cannot start.

vLLM runs as a child process and is used over HTTP only. It starts on the newest version that verifies, so that an
engine that died serves the same version again; if versions are adapters, on version 0, and an explorer loads them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from services.engine.adapters import adapter_arguments, warm_up_adapters
from services.engine.cpu import one_process, runs_on_cpu
from services.engine.ending import DRAIN_S, drain, end
from services.engine.gate import ADMIN_VARIABLE, IDENTITY_VARIABLE, STAGE_VARIABLE, WARMUP_VARIABLE
from services.engine.lease import StartLease
from services.engine.output import EngineOutput
from services.engine.stage import Stage, rebuilt, serve_stage
from services.engine.warmup import WarmingEngine
from shared.belonging import require_kind
from shared.config import Config, EngineAddress, is_loopback
from shared.engine_token import engine_token
from shared.errors import ConfigError, EngineError, StartupError, VersionError
from shared.experience import VersionState
from shared.ledger.connect import Ledger
from shared.ledger.queries import VersionRow, kept_versions
from shared.log import StageLogger, configure_logging
from shared.ports import require_free_port
from shared.process import adopt_orphans, boot_name, die_with_parent, import_path, visible_devices
from shared.soundness import read_base, require_sound
from shared.stop_request import StopRequest
from shared.versions import read_manifest, version_label, version_path

log = StageLogger("engine")


def run_engine(config: Config, name: str | None) -> int:
    """Run one engine until a signal or its death. Returns the exit status."""
    configure_logging("engine", config.log_level)
    address = _choose(config, name)
    stop = StopRequest().listen()
    adopt_orphans()  # vLLM's engine core outlives a killed server, and keeps its memory
    host = listen_host(config, address)
    require_free_port(host, address.port, f"engine.host or the url of explorer.engines {address.name!r}")
    if not is_loopback(host):
        log.warning("other machines reach this engine; keep it on a private network", host=host, port=address.port)
    with StartLease(config) as lease, serve_stage(config, address.name) as staging:
        stage, socket = staging or (None, "")
        folder = prepare_model(config, stop, lease, stage)
        return 0 if folder is None else _run_vllm(config, address, host, folder, socket, stop)


def _run_vllm(config: Config, address: EngineAddress, host: str, folder: Path, staging: str, stop: StopRequest) -> int:
    """Run vLLM on a version's folder until a signal or its death. Returns the exit status."""
    version = read_manifest(folder).version
    label = version_label(version, config.root / version_path(version))
    warmup_token = secrets.token_hex(16)
    log.info("starting vLLM", name=address.name, port=address.port, model=folder.name)
    process = subprocess.Popen(
        command_line(config, address, host, folder),
        env={
            **os.environ,
            **environment(config),
            **visible_devices(address.devices),
            WARMUP_VARIABLE: warmup_token,
            ADMIN_VARIABLE: engine_token(config),
            STAGE_VARIABLE: staging,
            IDENTITY_VARIABLE: _identity(address),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with_parent(),  # noqa: PLW1509 — one prctl call, no lock
    )
    output = EngineOutput(process.stdout, config.root / "logs" / f"vllm-{address.name}.log")
    try:
        url = f"http://{_reachable(host)}:{address.port}"
        with warm_up_adapters(config, folder, on_cpu=runs_on_cpu()) as adapters:
            with WarmingEngine(url, config.model.name, warmup_token, label, adapters) as warming:
                if not _start(process, warming, stop, config.engine.start_timeout_s, output):
                    return 0
            log.info("ready", name=address.name, url=address.url)
            while process.poll() is None and not stop.wait(0.5):
                pass
        if stop and process.poll() is None:
            with WarmingEngine(url, config.model.name, warmup_token) as serving:
                drain(serving)
        elif not stop:
            raise StartupError(
                f"vLLM ended by itself with status {process.returncode}: {output.reason(in_service=True)}"
            )
        return 0
    finally:
        end(process)


def listen_host(config: Config, address: EngineAddress) -> str:
    """Return the address to listen on: engine.host, or that of the url. Raises StartupError if it is unknown."""
    if config.engine.host is not None:
        return config.engine.host
    if is_loopback(address.host):
        return address.host
    try:
        found = str(socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as exc:
        raise StartupError(
            f"the url of explorer.engines {address.name!r} names {address.host!r}, which has no address here "
            f"({exc.strerror}); set engine.host to this machine's address"
        ) from exc
    if is_loopback(found):
        raise StartupError(
            f"the url of explorer.engines {address.name!r} names {address.host!r}, which is {found} here, where no "
            "other machine reaches it; set engine.host to this machine's address on the private network"
        )
    return found


def prepare_model(config: Config, stop: StopRequest, lease: StartLease, stage: Stage | None = None) -> Path | None:
    """Return the folder to serve, leased: in the shared folder, or staged for a delta. None after a stop request.

    Without any version, this publishes version 0; if versions/ is mounted read-only, it waits for the trainer to do so.
    """
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
        if _is_read_only(config.root / "versions"):
            log.info("versions are read-only here; waiting for the trainer to publish the base model")
            while not (rows := _loadable(ledger)):
                if stop.wait(1.0):
                    return None
        else:
            from trainer_service.base_version import ensure_base_version

            ensure_base_version(config, ledger)
            rows = _loadable(ledger)
        require_kind(config.model.kind, ledger)
        if stop:
            return None
        rows.sort(key=lambda row: (row.share or 0.0, row.state == VersionState.SERVING, row.version), reverse=True)
        return _choose_folder(config.root, rows, stage, partial(lease.take, ledger))


def _choose_folder(root: Path, rows: list[VersionRow], stage: Stage | None, lease: Callable[[int], bool]) -> Path:
    """Return the folder of the first proven and sound one of these versions. Raises StartupError if none is.

    An unproven version is never started on: an explorer loads it, and replaces it if it fails.
    """
    try:
        base = next((read_base(root, row) for row in rows if row.version == 0), None)
    except VersionError as error:
        raise StartupError(f"version 0 is what versions are compared with: {error}; restore its folder") from error
    for row in rows:
        if not (row.is_proven and lease(row.version)):
            continue
        try:
            if require_sound(root, row, base).form == "whole":
                return root / row.path
            return rebuilt(row, stage)
        except VersionError as error:
            log.warning("version skipped", version=row.version, reason=str(error))
    raise StartupError(f"no proven version in {root / 'versions'} is sound; restore one, or begin with a new root_dir")


def _loadable(ledger: Ledger) -> list[VersionRow]:
    return [row for row in ledger.fetch(kept_versions) if row.may_start_an_engine]


def _is_read_only(folder: Path) -> bool:
    return folder.exists() and bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def command_line(config: Config, address: EngineAddress, host: str, folder: Path) -> list[str]:
    """Return vLLM's arguments: those that training needs, then the user's."""
    engine = config.engine
    arguments = {
        "--model": str(folder),
        "--served-model-name": config.model.name,
        "--host": host,
        "--port": str(address.port),
        "--dtype": saved_dtype(folder) if engine.dtype == "auto" else engine.dtype,
        "--logprobs-mode": "processed_logprobs",  # as sampled, at any temperature and top_p
        "--uvicorn-log-level": "warning",
        "--shutdown-timeout": str(DRAIN_S),
        "--middleware": "services.engine.gate.EngineGate",
    }
    flags = ["--enable-prefix-caching", "--disable-uvicorn-access-log"]
    if engine.max_model_len is not None:
        arguments["--max-model-len"] = str(engine.max_model_len)
    if engine.tool_parser is not None:
        arguments["--tool-call-parser"] = engine.tool_parser
        flags.append("--enable-auto-tool-choice")
    flags += adapter_arguments(config, folder, on_cpu=runs_on_cpu())
    if runs_on_cpu():
        flags.append("--enforce-eager")
    elif engine.gpu_share is not None:
        arguments["--gpu-memory-utilization"] = f"{engine.gpu_share}"
    if address.devices is not None and len(address.devices) > 1:
        arguments["--tensor-parallel-size"] = f"{len(address.devices)}"
    pairs = [part for pair in arguments.items() for part in pair]
    return [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *pairs, *flags, *engine.extra_args]


def saved_dtype(folder: Path) -> str:
    """Return the weights' type from config.json. (vLLM's own `auto` serves float32 models in half precision.)"""
    model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(model.get("dtype") or model.get("torch_dtype") or "auto")


def environment(config: Config) -> dict[str, str]:
    """Return vLLM's environment: it enables administrative routes, downloads nothing, and can import our gate."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if config.model.kind == "lora" else "0",
        "VLLM_CPU_KVCACHE_SPACE": f"{config.engine.kv_cache_gb}",
        "VLLM_LOGGING_LEVEL": "INFO" if config.log_level == "DEBUG" else "WARNING",
        "PYTHONPATH": os.pathsep.join((import_path()["PYTHONPATH"], str(Path.cwd()))),  # for modules in extra_args
        **(one_process(len(os.sched_getaffinity(0)), os.environ) if runs_on_cpu() else {}),
    }


def _identity(address: EngineAddress) -> str:
    """Return the engine's own name: no other engine has it. A restart of the process does not change it."""
    return f"{boot_name() or secrets.token_hex(6)}-{address.port}-{address.name}"


def _choose(config: Config, name: str | None) -> EngineAddress:
    engines = {address.name: address for address in config.explorer.engines}
    if name is None and len(engines) == 1:
        (name,) = engines
    if name not in engines:
        problem = "--name is missing" if name is None else f"--name {name!r} is none of explorer.engines"
        raise ConfigError(f"{problem}; choose one of: {', '.join(engines)}")
    return engines[name]


def _reachable(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1" if host == "0.0.0.0" else "[::1]"
    return f"[{host}]" if ":" in host else host


def _start(
    process: subprocess.Popen[bytes], warming: WarmingEngine, stop: StopRequest, timeout_s: float, output: EngineOutput
) -> bool:
    """Wait until vLLM is healthy, warm it up, open it. Returns False after a stop request. Raises StartupError."""
    started = time.monotonic()
    while not warming.is_healthy():
        if process.poll() is not None:
            raise StartupError(f"vLLM could not start (status {process.returncode}): {output.reason(in_service=False)}")
        if time.monotonic() - started > timeout_s:
            raise StartupError(
                f"vLLM was not healthy after {timeout_s:g} s; raise engine.start_timeout_s, or see its log"
            )
        if stop.wait(0.5):
            return False
    log.info("warming up", loaded_s=time.monotonic() - started)
    is_late = False
    with ThreadPoolExecutor(1, "warm-up") as thread:
        warmed = thread.submit(warming.warm_up_and_open)
        while not (stop or is_late) and not wait([warmed], 0.2).done:
            is_late = time.monotonic() - started > timeout_s
        if not warmed.done():
            end(process)  # which ends its calls
    try:
        warmed.result()
    except EngineError as error:
        if stop:
            return False
        if is_late:
            raise StartupError(
                f"vLLM was not warm after {timeout_s:g} s; raise engine.start_timeout_s, or see its log"
            ) from error
        raise StartupError(
            f"the engine does not answer its warm-up ({error}): {output.reason(in_service=False)}"
        ) from error
    log.info("warm", seconds=time.monotonic() - started)
    return True
