"""Two explorers on one ledger in front of two scripted engines, and chats in flight during an event."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import httpx
from sqlalchemy import select

from shared.experience import Tokens
from shared.ledger.connect import Ledger
from shared.ledger.queries import list_versions
from shared.ledger.tables import experiences, payloads
from shared.versions import version_path
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, publish, wait_until

LONG = list(range(100, 140))  # a reply's tokens


@dataclasses.dataclass
class House:
    """Two explorers on one ledger in front of two engines."""

    explorers: list[RunningExplorer]
    engines: list[ScriptedEngine]
    asked: int = 1  # requests of the status from each: one address may have several workers

    @property
    def root(self) -> Path:
        return self.explorers[0].config.root

    @property
    def ledger(self) -> Ledger:
        return self.explorers[0].ledger

    @property
    def newest(self) -> int:
        """The last published version."""
        with self.ledger.read() as connection:
            return max(row.version for row in list_versions(connection))

    def state(self, version: int) -> str:
        return self.row(version).state

    def row(self, version: int):
        with self.ledger.read() as connection:
            return next(row for row in list_versions(connection) if row.version == version)

    def begin(self) -> House:
        """Publish versions 0 and 1, of which version 1 serves then, by engines that tell each token's version."""
        for version in (0, 1):
            self.publish(version)
        self.all_serve(1)
        for script in (engine.script for engine in self.engines):
            script.tells_weights, script.reply_ids, script.logprobs = True, LONG, [-0.5] * len(LONG)
            script.reload_s = 0.02  # labels are told apart by the middle of the load
            script.starts_on = self.root / version_path(1)
        return self

    def good(self) -> int:
        """Return the version that serves, on which engines start from now on."""
        with self.ledger.read() as connection:
            version = max(row.version for row in list_versions(connection) if row.state == "SERVING")
        for engine in self.engines:
            engine.script.starts_on = self.root / version_path(version)
        return version

    def mend(self) -> None:
        """End the engines' faults."""
        for script in (engine.script for engine in self.engines):
            for faults in (script.failed_loads, script.wrong_probe_for, script.deadly_loads, script.hung_loads):
                faults.clear()
            for paths in (script.refused, script.deadly, script.on_call):
                paths.clear()
            script.healthy, script.reload_s, script.stage = True, 0.02, None

    def all_serve(self, version: int) -> None:
        """Wait until both explorers send chats to both engines, and the engines hold the version."""
        asked = [explorer for explorer in self.explorers for _ in range(self.asked)]
        wait_until(lambda: all(self.serves(explorer, version) for explorer in asked), 120)
        assert all(engine.script.loaded.startswith(f"v{version:06d}") for engine in self.engines)
        assert not any(engine.script.paused for engine in self.engines)

    def serves(self, explorer: RunningExplorer, version: int, state: str = "serving") -> bool:
        """Whether this explorer sends chats to both engines, and the engines hold the version."""
        reply = explorer.http.get("/status")
        shown = reply.json()["engines"] if reply.status_code == 200 else [{"state": "unknown", "version": None}]
        return all((engine["state"], engine["version"]) == (state, version) for engine in shown)

    def publish(self, version: int) -> None:
        publish(self.explorers[0], version, -1.0 - version)

    def loads(self, version: int) -> int:
        calls = [call for engine in self.engines for call in engine.script.calls]
        return sum(call.startswith(f"reload v{version:06d}") for call in calls)

    def recorded(self) -> set[str]:
        """The messages in the ledger."""
        with self.ledger.read() as connection:
            return set(connection.execute(select(experiences.c.msg_id)).scalars())


class Streams:
    """Chats in flight during an event: four at each explorer. None ends by itself before the event."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.whole: list[str] = []
        self.ended: dict[str, str] = {}  # message id → the code of the error
        self._begun = 0
        self._lock = threading.Lock()
        urls = [explorer.url for explorer in house.explorers for _ in range(4)]
        self._threads = [threading.Thread(target=self._stream, args=(url, n)) for n, url in enumerate(urls)]

    def __enter__(self) -> Streams:
        for engine in self.house.engines:
            engine.script.gap_s, engine.script.streams_wait = 0.05, True
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self._begun == len(self._threads))
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self.house.engines:
            engine.script.streams_wait = False
        for thread in self._threads:
            thread.join(240)
            assert not thread.is_alive(), "a stream does not end"
        for engine in self.house.engines:
            engine.script.gap_s = 0.0

    def _stream(self, url: str, number: int) -> None:
        body = {"messages": [{"role": "user", "content": f"q{number}"}], "stream": True}
        with httpx.stream("POST", url + "/chat", json=body, timeout=120) as reply:
            msg_id, last = "", ""
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if not msg_id:
                        msg_id = event["id"]
                        with self._lock:
                            self._begun += 1
                    if "error" in event:
                        self.ended[msg_id] = event["error"]["code"]
                last = line or last
            if last == "data: [DONE]":
                self.whole.append(msg_id)
            else:
                self.ended.setdefault(msg_id, "broken off")

    def check_labels(self) -> None:
        """Assert that only complete streams have rows, with the versions that sampled their first and last token.

        A stream that ended because the ledger had not answered in time may be stored by then.
        """
        with self.house.ledger.read() as connection:
            query = select(experiences.c.msg_id, experiences.c.version, experiences.c.version_end, payloads.c.tokens)
            rows = {row.msg_id: row for row in connection.execute(query.join(payloads))}
        refused = {msg_id for msg_id, code in self.ended.items() if code != "ledger_unavailable"}
        assert not rows.keys() & refused
        for msg_id in self.whole:
            logprobs = Tokens.decode(rows[msg_id].tokens).logprobs
            assert (-logprobs[0], -logprobs[-1]) == (rows[msg_id].version, rows[msg_id].version_end)
