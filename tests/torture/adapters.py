"""All of Flywheel where versions are adapters, to be killed: two explorers, a trainer, and a scripted engine."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from shared.config import Config
from shared.engine_token import engine_token
from shared.ledger.connect import Ledger
from shared.ledger.queries import list_versions, pinned_versions
from tests.support.lives import Life, Lives
from tests.support.processes import Process, write_config
from tests.support.servers import free_port

EXPLORERS = ("explorer 0", "explorer 1")
PARTS = ("engine", *EXPLORERS, "trainer")
KEPT = 5  # versions whose files are kept
PINS = 2  # versions that the engine has room for beside the newest and the next


class Adapted:
    """The processes. Each can be killed and begun again."""

    def __init__(self, folder: Path, model: Path, forks: Lives, draw: random.Random) -> None:
        self._folder, self._forks, self._draw = folder, forks, draw
        engine = f"http://127.0.0.1:{free_port()}"
        self.configs = {name: _config(folder / "data", model, engine) for name in EXPLORERS}
        self.config = self.configs[EXPLORERS[0]]
        self._files = {name: write_config(c, folder / f"{name}.yaml") for name, c in self.configs.items()}
        self.ledger = Ledger.open(self.config.ledger_url)
        self._running: dict[str, Life | Process] = {}
        self.kills: Counter[str] = Counter()

    @property
    def urls(self) -> list[str]:
        """Of the explorers."""
        return [f"http://127.0.0.1:{config.explorer.port}" for config in self.configs.values()]

    def log(self, part: str) -> Path:
        return self._folder / f"{part}.log"

    def begin(self, part: str) -> None:
        if part == "engine":
            self._running[part] = self._begin_engine()
        else:
            file = self._files.get(part, self._files[EXPLORERS[0]])
            self._running[part] = self._forks.begin([part.split()[0], "-c", str(file)], self.log(part))

    def _begin_engine(self) -> Process:
        """One that stages adapters, or one that reads them where the trainer wrote them."""
        staging = str(self._folder / "staged") if self._draw.random() < 0.5 else "-"
        address = self.config.explorer.engines[0]
        arguments = [str(address.port), str(self.config.root), staging]
        return Process(arguments, self.log("engine"), "tests.support.engine_process")

    def kill(self, part: str) -> None:
        self._running[part].kill()
        self.kills[part] += 1

    def moving(self) -> bool:
        """Whether the engine loads or unloads an adapter at this moment, by what it said last."""
        said = self.log("engine").read_text().splitlines() if self.log("engine").exists() else []
        return bool(said) and said[-1].startswith(("loading", "unloading"))

    def stop(self) -> dict[str, int]:
        """End what is no scripted engine in order. Returns the exit statuses."""
        return {part: self._running[part].stop() for part in reversed(PARTS) if part != "engine"}

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
        self.ledger.close()


def held(config: Config) -> dict[str, str]:
    """The engine's adapters: name and folder. Raises httpx.HTTPError."""
    headers = {"X-Flywheel-Engine-Token": engine_token(config)}
    reply = httpx.get(f"{config.explorer.engines[0].url}/v1/models", headers=headers, timeout=60).raise_for_status()
    return {card["id"]: card["root"] for card in reply.json()["data"] if card["id"].startswith("agent@")}


def wanted(ledger: Ledger) -> set[str]:
    """The names of the adapters that an engine is to have, by the ledger: the newest version, and pins."""
    with ledger.read() as connection:
        rows = {row.version: row for row in list_versions(connection)}
        pins = [version for version in pinned_versions(connection) if version and rows[version].may_be_pinned]
    newest = max((version for version, row in rows.items() if row.may_serve), default=0)
    versions = {newest, *[version for version in pins if version != newest][:PINS]} - {0}
    return {f"agent@{version}+{(rows[version].manifest_sha256 or '')[:8]}" for version in versions}


def is_right(config: Config, ledger: Ledger) -> bool:
    """Whether the engine holds what the ledger asks for, before and after it was looked at, each from its own files."""
    before = wanted(ledger)
    try:
        found = held(config)
    except httpx.HTTPError:
        return False
    for name, root in found.items():
        version = int(name.partition("@")[2].partition("+")[0])
        assert Path(root).name.startswith(f"v{version:06d}"), f"{name} is {root}"
    return found.keys() == before == wanted(ledger)


def _config(root: Path, model: Path, engine: str) -> Config:
    return Config.model_validate(
        {
            "root_dir": str(root),
            "model": {"path": str(model), "kind": "lora", "lora": {"rank": 2}},
            "explorer": {
                "port": free_port(),
                "engines": [{"name": "e0", "url": engine}],
                "reload": {"poll_interval_s": 0.02, "retry_s": 0.1, "unpin_after_s": 1.0},
            },
            "engine": {"dtype": "float32", "max_loras": 2, "max_cpu_loras": PINS + 2},
            "trainer": {
                "batch_size": 8,
                "batch_timeout_s": 0.3,
                "poll_interval_s": 0.02,
                "cpu_threads": 1,
                # what the scripted engine says is of no model, and few rows change all of one of random weights
                "breaker": {"logprob_gap": None, "change_of_update": None},
            },
            "versions": {"max_versions": KEPT},
        }
    )


class Customers:
    """They ask for the newest version and for others by name, and look whose tokens they got."""

    def __init__(self, urls: list[str], count: int, *, tokens_tell: bool = True) -> None:
        """tokens_tell: each token's logprob is minus the version that sampled it."""
        self._urls = urls
        self._tokens_tell = tokens_tell
        self.answered: Counter[str] = Counter()  # by what was asked: "newest", "pin"
        self.refused: Counter[str] = Counter()  # by status, and "cut off"
        self.wrong: list[str] = []
        self._newest = 0
        self._come, self._end = threading.Event(), threading.Event()
        self._visiting = [threading.Lock() for _ in range(count)]
        self._threads = [threading.Thread(target=self._customer, args=(number,)) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def come(self) -> None:
        self._come.set()

    def pause(self) -> None:
        """Returns when nobody's request is under way."""
        self._come.clear()
        for visiting in self._visiting:
            visiting.acquire()
            visiting.release()

    def close(self) -> None:
        self._end.set()
        self._come.set()
        for thread in self._threads:
            thread.join(60)

    def _customer(self, number: int) -> None:
        draw = random.Random(number)
        with httpx.Client(base_url=self._urls[number % len(self._urls)], timeout=30) as http:
            while not self._end.wait(0.02):
                self._come.wait()
                with self._visiting[number]:
                    try:
                        self._visit(http, draw)
                    except httpx.HTTPError:  # refused or cut off
                        self.refused["cut off"] += 1
                        self._end.wait(0.05)

    def _visit(self, http: httpx.Client, draw: random.Random) -> None:
        pin = max(0, self._newest + 1 - draw.randrange(KEPT + 3)) if draw.random() < 0.5 else None
        model = "agent" if pin is None else f"agent@{pin}"
        body = {"model": model, "messages": [{"role": "user", "content": "w1"}], "max_tokens": 8, "logprobs": True}
        answer = (_streamed if draw.random() < 0.4 else _plain)(http, body)
        if answer.status != 200:
            self.refused[str(answer.status)] += 1
            if answer.status < 500 and (answer.status != 404 or pin is None):
                self.wrong.append(f"{model}: {answer}")
            return
        self._newest = max(self._newest, answer.version)
        if answer.models != {model} or pin not in (None, answer.version):
            self.wrong.append(f"{model}: {answer}")
        if self._tokens_tell and answer.logprobs != {-float(answer.version)}:
            self.wrong.append(f"{model}: sampled by another version than it says: {answer}")
        self.answered["newest" if pin is None else "pin"] += 1
        if draw.random() < 0.5:
            self._rate(http, answer.msg_id, draw)

    def _rate(self, http: httpx.Client, msg_id: str, draw: random.Random) -> None:
        http.post("/feedback", json={"msg_ids": [msg_id], "reward": draw.random()}).raise_for_status()
        http.post("/commit").raise_for_status()


@dataclass(slots=True)
class Answer:
    """What a customer saw."""

    status: int
    version: int = -1
    msg_id: str = ""
    models: set[str] = field(default_factory=set)
    logprobs: set[float] = field(default_factory=set)
    error: str = ""

    def note(self, said: dict[str, Any]) -> None:
        """A reply, or an event of one."""
        if "error" in said:
            raise httpx.RemoteProtocolError(str(said["error"]))
        self.msg_id = said["id"]
        self.models.add(said["model"])
        tokens = [token for choice in said["choices"] for token in (choice.get("logprobs") or {}).get("content") or ()]
        self.logprobs |= {token["logprob"] for token in tokens}


def _plain(http: httpx.Client, body: dict[str, object]) -> Answer:
    reply = http.post("/v1/chat/completions", json=body)
    if reply.status_code != 200:
        return Answer(reply.status_code, error=reply.text)
    answer = Answer(200, int(reply.headers["X-Flywheel-Version"]))
    answer.note(reply.json())
    return answer


def _streamed(http: httpx.Client, body: dict[str, object]) -> Answer:
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply:
        if reply.status_code != 200:
            return Answer(reply.status_code, error=reply.read().decode())
        answer, last = Answer(200, int(reply.headers["X-Flywheel-Version"])), ""
        for line in filter(None, reply.iter_lines()):
            last = line
            if line.startswith("data: {"):
                answer.note(json.loads(line.removeprefix("data: ")))
    if last != "data: [DONE]":
        raise httpx.RemoteProtocolError("the stream ended without [DONE]")
    return answer
