"""Adapters on the real engine: several versions side by side, loaded under streams, each exactly what PEFT says."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sqlalchemy import select

from benchmarks.reload.adapters import AdapterPublisher
from shared.config import Config
from shared.engine_token import engine_token
from shared.experience import Tokens
from shared.ledger.connect import Ledger
from shared.ledger.queries import list_versions
from shared.ledger.tables import experiences, payloads
from tests.e2e.conftest import LEDGER_S
from tests.e2e.test_1_loop import LOGPROB_TOLERANCE
from tests.support.models import make_tiny_model
from tests.support.processes import Process, wait_for, write_config
from tests.support.servers import free_port

pytestmark = pytest.mark.engine
STREAMS = 6


class Service:
    """One engine that loads adapters, an explorer, and a hand that publishes."""

    def __init__(
        self, config: Config, file: Path, processes: tuple[Process, Process], http: httpx.Client, ledger: Ledger
    ) -> None:
        """processes: of engine and explorer."""
        self.config = config
        self.file = file
        self.processes = processes
        self.http = http
        self.ledger = ledger
        self.publisher = AdapterPublisher(config, ledger, size=0.2)

    def chat(self, **body: Any) -> httpx.Response:
        return self.http.post("/chat", json={"messages": [{"role": "user", "content": "hello w1"}], **body})

    def publish(self) -> int:
        self.publisher.prepare()
        return self.publisher.publish()

    def serves(self, version: int) -> bool:
        reply = self.chat(max_tokens=1)
        return reply.status_code == 200 and reply.headers["X-Flywheel-Version"] == str(version)

    def at_the_engine(self) -> dict[str, str]:
        """What the engine answers to: names and folders."""
        url = self.config.explorer.engines[0].url
        headers = {"X-Flywheel-Engine-Token": engine_token(self.config)}
        cards = httpx.get(url + "/v1/models", headers=headers, timeout=30).raise_for_status().json()["data"]
        return {card["id"]: card["root"] for card in cards}

    def state(self, version: int) -> str:
        with self.ledger.read() as connection:
            return next(row.state for row in list_versions(connection) if row.version == version)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("adapters")
    base = make_tiny_model(root / "base", architecture="Qwen3")
    config = Config.model_validate(
        {
            "root_dir": str(root / "data"),
            "model": {"path": str(base), "kind": "lora", "lora": {"rank": 2, "alpha": 4}},
            "explorer": {
                "port": free_port(),
                "engines": [{"name": "e0", "url": f"http://127.0.0.1:{free_port()}"}],
                "reload": {"poll_interval_s": 0.1},
                "ledger_timeout_s": LEDGER_S,
            },
            "engine": {"dtype": "float32", "max_model_len": 256, "staging_dir": str(root / "staged"), "max_loras": 3},
            "trainer": {
                "algorithms": {"ppo": 1.0, "sft": 0.2},
                "batch_size": 8,
                "learning_rate": 1e-3,
                "breaker": {"change_of_update": None},
                "poll_interval_s": 0.1,
                "cpu_threads": 1,
            },
        }
    )
    file = write_config(config, root / "flywheel.yaml")
    http = httpx.Client(base_url=f"http://127.0.0.1:{config.explorer.port}", timeout=120)
    with (
        Process(["engine", "-c", str(file)], root / "engine.log") as engine,
        Process(["explorer", "-c", str(file)], root / "explorer.log") as explorer,
        http,
    ):
        wait_for(lambda: _is_ready(http, engine, explorer), "ready", 240, 0.5)
        with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
            yield Service(config, file, (engine, explorer), http, ledger)
        assert explorer.stop() == 0, explorer.output()[-2000:]
        assert engine.stop() == 0, engine.output()[-2000:]


def _is_ready(http: httpx.Client, *processes: Process) -> bool:
    for process in processes:
        assert process.alive, process.output()[-3000:]
    try:
        return http.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def stream(service: Service, number: int, model: str, ends: dict[str, str], begun: threading.Semaphore) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": f"w{number}"}], "max_tokens": 200}
    url = f"{service.http.base_url}/v1/chat/completions"
    with httpx.stream("POST", url, json={**body, "stream": True, "ignore_eos": True}, timeout=120) as reply:
        msg_id, end = "", ""
        for line in filter(None, reply.iter_lines()):
            if not msg_id and line.startswith("data: {"):
                shown = json.loads(line[6:])
                assert shown["model"] == model
                msg_id = shown["id"]
                begun.release()
            end = line
    ends[msg_id] = end


def test_versions_are_loaded_under_streams_that_stay_whole_and_each_row_is_what_its_version_says(service):
    assert service.chat(max_tokens=4).headers["X-Flywheel-Version"] == "0"
    first = service.publish()
    wait_for(lambda: service.serves(first), "the first adapter", 240)
    ends: dict[str, str] = {}
    begun = threading.Semaphore(0)
    models = ["agent", f"agent@{first}", "agent@0"] * (STREAMS // 3)
    threads = [threading.Thread(target=stream, args=(service, n, m, ends, begun)) for n, m in enumerate(models)]
    for thread in threads:
        thread.start()
    for _ in threads:
        begun.acquire()
    newer = []
    for _ in range(3):
        newer.append(service.publish())
        wait_for(lambda: service.serves(newer[-1]), "a newer adapter", 240)
    for version in (0, first, *newer[1:]):
        reply = service.chat(model=f"agent@{version}", max_tokens=8)
        assert (reply.status_code, reply.headers["X-Flywheel-Version"]) == (200, str(version)), reply.text
    for thread in threads:
        thread.join()
    assert list(ends.values()) == ["data: [DONE]"] * STREAMS
    with service.ledger.read() as connection:
        rows = connection.execute(select(experiences, payloads.c.tokens).join(payloads)).all()
    assert {row.version for row in rows} == {0, first, *newer}
    for row in rows:
        tokens = Tokens.decode(row.tokens)
        assert row.version == row.version_end
        own = recompute_adapted(service, row.version, tokens)
        assert np.abs(own - tokens.logprobs).max() < LOGPROB_TOLERANCE, row.version


def recompute_adapted(service: Service, version: int, tokens: Tokens) -> np.ndarray[Any, Any]:
    """The reply's logprobs by the base and the adapter's product, in float32."""
    import torch

    with service.publisher.adapted(version) as model, torch.no_grad():
        ids = torch.from_numpy(np.concatenate([tokens.prompt_ids, tokens.reply_ids]).astype(np.int64))[None]
        logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), -1)
    at = np.arange(len(tokens.prompt_ids) - 1, ids.shape[1] - 1)
    return logprobs[at, torch.from_numpy(tokens.reply_ids.astype(np.int64))].numpy()


def test_chats_are_divided_among_adapters_and_each_row_is_what_its_version_says(service):
    old, new = (service.publish() for _ in range(2))
    wait_for(lambda: service.serves(new), "an adapter", 240)
    service.http.put("/traffic", json={"weights": {old: 1, new: 1}}).raise_for_status()
    wait_for(lambda: service.serves(old), "the earlier one", 240)
    waiting = service.publish()
    replies = [service.chat(max_tokens=8, metadata={"run_id": f"divided {run % 12}"}) for run in range(36)]
    assert {reply.status_code for reply in replies} == {200}
    of_run = [int(reply.headers["X-Flywheel-Version"]) for reply in replies]
    assert set(of_run) == {old, new} and of_run == 3 * of_run[:12]
    with service.ledger.read() as connection:
        divided = select(experiences, payloads.c.tokens).join(payloads).where(experiences.c.run_id.like("divided %"))
        rows = connection.execute(divided.order_by(experiences.c.id)).all()
    assert [row.version for row in rows] == of_run
    for row in rows:
        tokens = Tokens.decode(row.tokens)
        own = recompute_adapted(service, row.version, tokens)
        assert np.abs(own - tokens.logprobs).max() < LOGPROB_TOLERANCE, row.version
    assert service.state(waiting) == "PUBLISHED"
    service.http.put("/traffic", json={"weights": None}).raise_for_status()
    wait_for(lambda: service.serves(waiting), "the newest", 240)


def test_an_adapter_that_the_engine_cannot_hold_is_refused_and_the_rest_serves_on(service):
    before = service.publish()
    wait_for(lambda: service.serves(before), "an adapter", 240)
    service.publisher.prepare()
    folder: Path = service.config.root / f"versions/v{service.publisher.version:06d}"
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 64}))
    broken = service.publisher.publish()
    wait_for(lambda: service.state(broken) == "REJECTED", "the verdict", 240)
    assert service.serves(before)
    assert not any(name.startswith(f"agent@{broken}+") for name in service.at_the_engine())


def test_what_is_no_longer_asked_for_leaves_the_engine_and_what_is_staged_of_the_others_stays(service):
    versions = [service.publish() for _ in range(2)]
    wait_for(lambda: service.serves(versions[-1]), "an adapter", 240)
    held = wait_for(lambda: _settled(service, versions[-1]), "the older ones gone", 240)
    assert all(Path(root).is_dir() for name, root in held.items() if name != "agent")


def _settled(service: Service, newest: int) -> dict[str, str] | None:
    held = service.at_the_engine()
    pinned = {name for name in held if name.startswith("agent@")}
    return held if any(name.startswith(f"agent@{newest}+") for name in pinned) and len(pinned) <= 4 else None


def test_a_trainer_goes_on_from_the_newest_adapter_and_what_it_learns_is_served(service, lives, tmp_path):
    before = int(service.chat(max_tokens=1).headers["X-Flywheel-Version"])
    ids = [service.chat(max_tokens=12).json()["id"] for _ in range(8)]
    for number, msg_id in enumerate(ids):
        said = {"reward": float(number % 4)} if number < 4 else {"correction": "w1 w2 w3"}
        service.http.post("/feedback", json={"msg_ids": [msg_id], **said}).raise_for_status()
    with lives.begin(["trainer", "-c", str(service.file)], tmp_path / "trainer.log") as trainer:
        service.http.post("/commit").raise_for_status()
        wait_for(lambda: service.serves(before + 1), "what was learned", 240)
        stats = service.http.get("/status").json()["trainers"][0]["stats"]
        assert trainer.stop() == 0, trainer.output()[-2000:]
    assert {"ppo/policy_loss", "sft/negative_log_likelihood"} <= stats.keys()
    assert stats["logprob_gap_max"] < LOGPROB_TOLERANCE
    pinned = service.chat(model=f"agent@{before}", max_tokens=4)
    assert pinned.headers["X-Flywheel-Version"] == str(before)


def test_streams_in_flight_when_engine_and_explorer_stop_together_end_whole_and_are_recorded(service):
    """The last test of this service: afterwards it has ended."""
    ends: dict[str, str] = {}
    begun = threading.Semaphore(0)
    threads = [threading.Thread(target=stream, args=(service, n, "agent", ends, begun)) for n in range(STREAMS)]
    for thread in threads:
        thread.start()
    for _ in threads:
        begun.acquire()
    for process in service.processes:
        process.send(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert list(ends.values()) == ["data: [DONE]"] * STREAMS
    with service.ledger.read() as connection:
        query = select(experiences.c.msg_id).where(experiences.c.msg_id.in_(ends))
        assert set(connection.execute(query).scalars()) == set(ends)
