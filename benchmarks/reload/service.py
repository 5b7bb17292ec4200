"""The measured service, as processes: `flywheel engine` and `flywheel explorer`; and the trainer's part."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.reload.adapters import AdapterPublisher
from shared.config import Config, load_config
from shared.engine_token import engine_token
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.probe import Probe
from shared.process import die_with_parent
from shared.versions import read_manifest, version_path

REPOSITORY = Path(__file__).parents[2]
START_S = 300.0
POLL_INTERVAL_S = 0.5
TOKEN_HEADER = "X-Flywheel-Engine-Token"
LORA = {"lora": {"rank": 8, "alpha": 16}}


class Service:
    """Engines and an explorer, ready. The stack ends them."""

    def __init__(
        self, folder: Path, model: Path, engines: int, stack: ExitStack, kind: str = "full", streams: str = "go_on"
    ) -> None:
        """streams: as `explorer.reload.streams`."""
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._stack = stack
        self._kind = kind
        self._reload = {"poll_interval_s": POLL_INTERVAL_S, "streams": streams}
        self.file = folder / "flywheel.yaml"
        addresses = [{"name": f"e{n}", "url": f"http://127.0.0.1:{_free_port()}"} for n in range(engines)]
        self._write_config(self.file, model, addresses)
        self.config: Config = load_config(self.file, {})
        self.url = f"http://127.0.0.1:{self.config.explorer.port}"
        self.engines = [address.url for address in self.config.explorer.engines]
        self.admin = {TOKEN_HEADER: engine_token(self.config)}
        # one client for all requests: to make another takes as long as a prefill, and some requests are timed
        self.http = stack.enter_context(httpx.Client(trust_env=False, timeout=120))
        for address in addresses:
            self._start(["engine", "-c", str(self.file), "--name", address["name"]], address["name"])
            _wait(self.http, f"{address['url']}/health")
        self._start(["explorer", "-c", str(self.file)], "explorer")
        _wait(self.http, f"{self.url}/ready")
        self.ledger = stack.enter_context(contextlib.closing(Ledger.open(self.config.ledger_url)))
        make = Publisher if kind == "full" else AdapterPublisher
        self.publisher: Publisher | AdapterPublisher = make(self.config, self.ledger)

    def _write_config(self, file: Path, model: Path, addresses: list[dict[str, str]]) -> None:
        config = {
            "root_dir": str(self._folder / "data"),
            "model": {"path": str(model), "kind": self._kind, **(LORA if self._kind == "lora" else {})},
            "explorer": {"port": _free_port(), "engines": addresses, "reload": self._reload},
            "engine": {"max_model_len": 1024, "staging_dir": str(self._folder / "staged")},
        }
        file.write_text(yaml.safe_dump(config))

    def _start(self, arguments: list[str], name: str) -> None:
        self._stack.enter_context(_running(arguments, self._folder / f"{name}.log"))

    def start_explorer(self) -> str:
        """Start another explorer of the same engines. Returns its url."""
        file = self._folder / "other.yaml"
        port = _free_port()
        config = yaml.safe_load(self.file.read_text())
        config["explorer"]["port"] = port
        file.write_text(yaml.safe_dump(config))
        self._start(["explorer", "-c", str(file)], "other")
        _wait(self.http, f"http://127.0.0.1:{port}/ready")
        return f"http://127.0.0.1:{port}"

    def prepare_version(self) -> None:
        """Write the next version's folder, which has no effect before `publish`."""
        self.publisher.prepare()

    def publish(self) -> int:
        """Make the prepared version official. Returns its number."""
        return self.publisher.publish()

    def read_metrics(self) -> str:
        """The explorer's metrics so far."""
        return self.http.get(f"{self.url}/metrics").text

    def read_version(self) -> int:
        """The version in service."""
        return int(self.http.get(f"{self.url}/status").json()["versions"]["serving"])

    def read_seconds(self) -> float:
        """Time to read the weights of the version in service, without hashing."""
        file = self.config.root / version_path(self.read_version()) / "model.safetensors"
        started = time.perf_counter()
        with file.open("rb") as stream:
            while stream.read(1024 * 1024):
                pass
        return time.perf_counter() - started

    def ask_engine(self, method: str, path: str, body: object = None, url: str | None = None) -> Any:
        """An engine's answer to an administration request."""
        reply = self.http.request(method, (url or self.engines[0]) + path, json=body, headers=self.admin)
        return reply.raise_for_status().json() if reply.content else None

    def is_fresh_engine_equal(self, model: Path) -> bool:
        """Whether a newly started engine holds the same weights as each engine that made all reloads."""
        address = {"name": "fresh", "url": f"http://127.0.0.1:{_free_port()}"}
        file = self._folder / "fresh.yaml"
        self._write_config(file, model, [address])
        self._start(["engine", "-c", str(file)], "fresh")
        _wait(self.http, f"{address['url']}/health")
        baseline = self.ask_engine("POST", "/weight_checker", {"action": "checksum"}, address["url"])["checksums"]
        body = {"action": "compare", "baseline": baseline}
        return all(self.ask_engine("POST", "/weight_checker", body, url)["match"] for url in self.engines)


class Publisher:
    """Writes versions like the trainer; each is a small random step from the one before."""

    def __init__(self, config: Config, ledger: Ledger) -> None:
        from trainer_service.models import load_causal_lm

        self._config = config
        self._ledger = ledger
        self._model = load_causal_lm(config.root / version_path(0))
        self._version = 0
        self._about: dict[str, Any] = {}
        self.row_at = 0.0  # time.monotonic() before the commit of the last version's row

    def prepare(self) -> None:
        import torch

        from trainer_service.models import named_weights
        from trainer_service.publish import as_published, compute_probe, probe_sequences, write_full_version

        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        with self._ledger.write() as connection:
            self._version = transitions.reserve_version(connection, writer="trainer")
        root = self._config.root
        dtype = read_manifest(root / version_path(0)).probe.dtype
        probe = Probe(dtype, compute_probe(self._model, probe_sequences(root)))
        numbers = {"version": self._version, "parent": self._version - 1, "step": self._version}
        manifest = write_full_version(root, named_weights(self._model).__getitem__, probe, **numbers)
        self._about = as_published(root, manifest)

    def publish(self) -> int:
        version = self._version
        with self._ledger.write() as connection:
            transitions.publish(
                connection,
                version=version,
                parent=version - 1,
                kind="full",
                step=version,
                trainer="trainer",
                **self._about,
            )
            self.row_at = time.monotonic()
        return version


@contextlib.contextmanager
def _running(arguments: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        command = [sys.executable, "-m", "services.cli", *arguments]
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdout=output,
            stderr=output,
            process_group=0,  # a group, not a session; see decision 10
            preexec_fn=die_with_parent(),  # noqa: PLW1509 — one prctl call, no lock
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(http: httpx.Client, url: str) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if http.get(url).status_code == 200:
                return
        if time.monotonic() > deadline:
            raise SystemExit(f"{url} was not ready within {START_S:g} s")
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
