"""The real product, twice for all tests here: `flywheel up` with vLLM's CPU build, the explorer and the trainer.

Of several workers, one runs the tests of `live` and one those of `tools_live` (see tests.support.scheduling).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.config import Config
from shared.ledger.connect import Ledger
from tests.support.forms import FULL
from tests.support.models import make_tiny_model
from tests.support.processes import Process, wait_for, write_config
from tests.support.servers import free_port
from tests.support.tool_model import make_tool_model

ENGINE_START_S = 480.0
LEDGER_S = 20.0  # a busy machine's disk may take seconds
DEFAULT_REPETITION_PENALTY = 1.1  # of the model


@dataclass(slots=True)
class Live:
    """A running `flywheel up`."""

    process: Process
    config: Config
    file: Path
    http: httpx.Client

    @property
    def engine_url(self) -> str:
        return self.config.explorer.engines[0].url

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.http.get("/status").raise_for_status().json()
        return status

    def chat(self, **body: Any) -> dict[str, Any]:
        """One chat through the explorer; retried while it answers 503."""
        body = {"messages": [{"role": "user", "content": "hello w1 w2"}], "max_tokens": 12, **body}
        reply = wait_for(lambda: _unless_away(self.http.post("/v1/chat/completions", json=body)), "an answer", 120)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return {**answer, "version": int(reply.headers["X-Flywheel-Version"])}

    def rate(self, msg_id: str, reward: float) -> None:
        self.http.post("/feedback", json={"msg_ids": [msg_id], "reward": reward}).raise_for_status()

    def learn(self, chats: int, **body: Any) -> int:
        """Chat, rate and commit; returns the version in service when all of it is trained, which is a new one."""
        before = self.status()["versions"]["serving"]
        for number in range(chats):
            self.rate(self.chat(**body)["id"], float(number % 2))
        self.http.post("/commit").raise_for_status()

        def settled() -> bool:
            status = self.status()
            waiting = status["rows"]["READY"] + status["rows"]["LEASED"]
            return not waiting and not status["lag_versions"] and (status["versions"]["serving"] or 0) > before

        wait_for(settled, "a new version in service", 240)
        return int(self.status()["versions"]["serving"])


def _unless_away(reply: httpx.Response) -> httpx.Response | None:
    return None if reply.status_code == 503 else reply


@pytest.fixture(scope="package")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("live")
    model = make_tiny_model(root / "base", tied=True)
    generation = model / "generation_config.json"
    defaults = json.loads(generation.read_text()) | {"repetition_penalty": DEFAULT_REPETITION_PENALTY}
    generation.write_text(json.dumps(defaults))  # as Qwen2.5-Instruct has one
    config = Config.model_validate(
        {
            "root_dir": str(root / "data"),
            "model": {"path": str(model)},
            "explorer": {
                "port": free_port(),
                "engines": [{"name": "e0", "url": f"http://127.0.0.1:{free_port()}"}],
                "reload": {"poll_interval_s": 0.1, "appear_s": 600.0},
                "ledger_timeout_s": LEDGER_S,
            },
            "engine": {"dtype": "float32", "max_model_len": 256},
            "trainer": {
                "batch_size": 8,
                "batch_timeout_s": 1.0,  # else a row that one test commits alone waits for the next test's rows
                "learning_rate": 1e-3,
                "breaker": {"change_of_update": None},  # a few rows change all of a model of random weights
                "poll_interval_s": 0.1,
                "cpu_threads": 1,
            },
        }
    )
    with running_flywheel(config, root) as running:
        yield running


@pytest.fixture(scope="package")
def tools_live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A second `flywheel up`, on a model that has learned to use tools."""
    root = tmp_path_factory.mktemp("tools")
    config = Config.model_validate(
        {
            "root_dir": str(root / "data"),
            "model": {"path": str(make_tool_model(root / "base"))},
            "explorer": {
                "port": free_port(),
                "engines": [{"name": "e0", "url": f"http://127.0.0.1:{free_port()}"}],
                "ledger_timeout_s": LEDGER_S,
            },
            "engine": {"dtype": "float32", "max_model_len": 2048, "tool_parser": "hermes"},
            # the model is sure of the few sentences that it has learned, and agents with other rewards share it
            "trainer": {"batch_size": 16 if FULL else 8, "breaker": {"min_entropy": None, "reward_drop": None}},
        }
    )
    with running_flywheel(config, root) as live:
        yield live


@pytest.fixture
def ledger(live: Live) -> Iterator[Ledger]:
    """The ledger that `live` records in."""
    opened = Ledger.open(live.config.ledger_url)
    yield opened
    opened.close()


@contextlib.contextmanager
def running_flywheel(config: Config, root: Path) -> Iterator[Live]:
    """`flywheel up` until the end of the block, once it is ready."""
    file = write_config(config, root / "flywheel.yaml")
    http = httpx.Client(base_url=f"http://127.0.0.1:{config.explorer.port}", timeout=120)
    with Process(["up", "-c", str(file)], root / "flywheel.log") as process, http:
        running = Live(process, config, file, http)
        wait_for(lambda: _is_ready(running), "ready", ENGINE_START_S, 0.5)
        yield running
        http.close()
        assert process.stop(60) == 0, process.output()[-2000:]


def _is_ready(live: Live) -> bool:
    assert live.process.alive, live.process.output()[-2000:]
    try:
        return live.http.get("/ready").status_code == 200
    except httpx.TransportError:
        return False
