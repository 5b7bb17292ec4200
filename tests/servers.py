"""Starting the real explorer for tests: the real app under the real server, in a thread, on a free port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from explorer_service.app import build_app
from explorer_service.door import Door
from services.explorer import make_deps_factory
from shared.config import Config
from shared.ledger.connect import Ledger
from shared.versions import Manifest, Probe, ProbeSequence, write_version


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_config(
    root: Path,
    engine_urls: list[str],
    reward: dict[str, Any] | None = None,
    database_url: str | None = None,
    **explorer: Any,
) -> Config:
    return Config.model_validate(
        {
            "root_dir": str(root),
            "model": {"path": str(root / "base")},
            "engine": {"dtype": "float32"},
            "reward": reward or {},
            "database_url": database_url,
            "explorer": {
                "engines": [{"name": f"e{n}", "url": url} for n, url in enumerate(engine_urls)],
                "reload": {"poll_interval_s": 0.02, "drain_s": 1.0},
                "engine_wait_s": 5.0,
                **explorer,
            },
        }
    )


class RunningExplorer:
    """The explorer as a server, and a client for it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.ledger = Ledger.open(config.ledger_url)
        port = free_port()
        app = build_app(*make_deps_factory(config, self.ledger))
        self.server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", lifespan="on", loop="uvloop", http=Door)
        )
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self.app = app
        wait_until(lambda: self.server.started)

    def wait_ready(self) -> RunningExplorer:
        wait_until(lambda: self.http.get("/ready").status_code == 200)
        return self

    def chat(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **body})

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(15)
        self.http.close()
        self.ledger.close()
        assert not self.thread.is_alive()


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


def write_scripted_version(root: Path, version: int, logprob: float) -> Path:
    """A version whose only weight is its probe."""
    probe = Probe("float32", [ProbeSequence([5, 6, 7], [logprob, logprob])])
    manifest = Manifest(version, version - 1 if version else None, "full", "base", "", version, time.time(), {}, probe)

    def write_files(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"weights of %d" % version)

    write_version(root, manifest, write_files)
    return root / f"versions/v{version:06d}"
