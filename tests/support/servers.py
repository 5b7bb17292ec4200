"""Starts the real explorer for tests: the real app in the real server, in a thread, on a free port."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import random
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from explorer_service.app import build_app
from explorer_service.background import Background
from explorer_service.deps import Deps
from services.explorer import build_server, listen, open_deps
from shared.config import Config
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.driver import answering_within
from shared.probe import Probe, ProbeSequence
from shared.versions import Manifest, write_version


@functools.cache
def _ports() -> Iterator[int]:
    """The ports of this process's tests, in random order: other workers of pytest have other ports."""
    first = 12_000 + 2_000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 10)
    return itertools.cycle(random.SystemRandom().sample(range(first, first + 2_000), 2_000))


def free_port() -> int:
    """An unused port below those of outgoing connections, so that a server can restart on it."""
    while True:
        port = next(_ports())
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def make_config(
    root: Path,
    engine_urls: list[str],
    reward: dict[str, Any] | None = None,
    database_url: str | None = None,
    model: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    **explorer: Any,
) -> Config:
    return Config.model_validate(
        {
            "root_dir": str(root),
            "model": {"path": str(root / "base"), **(model or {})},
            "engine": {"dtype": "float32", **(engine or {})},
            "reward": reward or {},
            "database_url": database_url,
            "explorer": {
                "engines": [{"name": f"e{n}", "url": url} for n, url in enumerate(engine_urls)],
                "reload": {"poll_interval_s": 0.02, "drain_s": 1.0, "appear_s": 600.0},
                "engine_wait_s": 30.0,  # and so may a reload
                "ledger_timeout_s": 45.0,  # a busy machine and its disk may each take ten seconds
                "allowed_hosts": ["x"],  # the host in hand-written HTTP of tests
                "port": free_port(),
                **explorer,
            },
        }
    )


class RunningExplorer:
    """The explorer as a server, and a client for it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.deps: Deps  # set after the start
        self.ledger = Ledger.open(config.ledger_url, answering_within(config.explorer.ledger_timeout_s))
        self.background = Background(lambda: None)  # the test's process continues when a side task dies
        self.app = build_app(self._open_deps, config.explorer)
        self.server = build_server(self.app, config.explorer)
        listener = listen(config.explorer)
        self.thread = threading.Thread(target=self.server.run, args=([listener],), daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{config.explorer.port}"
        json = {"Content-Type": "application/json"}  # for bodies given as bytes
        self.http = httpx.Client(base_url=self.url, headers=json, timeout=120, verify=False)
        wait_until(lambda: self.server.started)

    @asynccontextmanager
    async def _open_deps(self) -> AsyncIterator[Deps]:
        async with open_deps(self.config, self.ledger, self.background) as self.deps:
            yield self.deps

    def wait_ready(self) -> RunningExplorer:
        wait_until(lambda: self.http.get("/ready").status_code == 200)
        return self

    def chat(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **body})

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(120)
        self.http.close()
        self.ledger.close()
        assert not self.thread.is_alive()
        assert self.background.failed is None, f"{self.background.failed} died"


def wait_until(condition: Callable[[], bool], timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


def wait_joined(explorers: Sequence[RunningExplorer]) -> None:
    """Wait until they know of each other, so that none delays streams or feedback."""
    members = [explorer.deps.membership for explorer in explorers]
    wait_until(lambda: all(not one.is_alone and time.monotonic() >= one.noticed_at for one in members))


TENSORS = {"embed.weight": ("F32", [2, 3]), "head.weight": ("F32", [3])}


def safetensors(tensors: dict[str, tuple[str, list[int]]], version: int = 0) -> bytes:
    """A safetensors file of float32 tensors; the last bytes name the version."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * (4 if dtype == "F32" else 2)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + bytes(max(0, end - 4)) + struct.pack("<I", version)[:end]


def write_scripted_version(
    root: Path,
    version: int,
    logprob: float,
    files: dict[str, bytes] | None = None,
    base: str = "",
    arithmetic: str = "float32",
) -> Path:
    """A version with small weights; the scripted engine uses its probe. files: added, or in place of the weights."""
    probe = Probe("float32", [ProbeSequence([5, 6, 7], [logprob, logprob])], arithmetic=arithmetic)
    manifest = Manifest(
        version, version - 1 if version else None, "full", "base", base, version, time.time(), {}, probe
    )

    def write_files(folder: Path) -> None:
        for name, data in {"model.safetensors": safetensors(TENSORS, version), **(files or {})}.items():
            (folder / name).write_bytes(data)

    write_version(root, manifest, write_files)
    return root / f"versions/v{version:06d}"


def publish(explorer: RunningExplorer, version: int, logprob: float = -1.0, arithmetic: str = "float32") -> Path:
    folder = write_scripted_version(explorer.config.root, version, logprob, arithmetic=arithmetic)
    with explorer.ledger.write() as connection:
        parent = version - 1 if version else None
        transitions.publish(connection, version=version, parent=parent, kind="full", step=version)
    return folder


def served(explorer: RunningExplorer) -> str:
    """The version that answers a chat; empty if no engine was free in time."""
    return explorer.chat().headers.get("X-Flywheel-Version", "")


def keys_of_roles(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """`explorer.keys` with one key for each role: secret-key-of-ROLE."""
    for role in ("chat", "feedback", "admin"):
        monkeypatch.setenv(f"KEY_{role}", f"secret-key-of-{role}")
    return [{"key_env": f"KEY_{role}", "role": role} for role in ("chat", "feedback", "admin")]
