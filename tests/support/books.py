"""Customers who record every acknowledgement, outside the process that is killed."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import dataclass, field

import httpx
from sqlalchemy import select

from shared.ledger.connect import Ledger
from shared.ledger.tables import experiences, signals


@dataclass(slots=True)
class Books:
    """The acknowledgements of the service."""

    url: str
    pause_s: float = 0.002  # between a customer's visits
    chats: set[str] = field(default_factory=set)  # answered, or streamed up to [DONE]
    rewards: dict[str, float] = field(default_factory=dict)  # acknowledged by receipts of feedback
    committed: set[str] = field(default_factory=set)  # rewarded before an acknowledged commit
    refused: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def open(self, customers: int) -> None:
        """Start the customers."""
        self._threads = [threading.Thread(target=self._customer, args=(n,)) for n in range(customers)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop the customers."""
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _customer(self, number: int) -> None:
        draw = random.Random(number)
        with httpx.Client(base_url=self.url, timeout=30, verify=False) as http:
            while not self._stop.wait(self.pause_s):
                try:
                    self._visit(http, draw)
                except httpx.HTTPError:  # refused or cut off: nothing was acknowledged
                    self.refused += 1
                    self._stop.wait(0.05)

    def _visit(self, http: httpx.Client, draw: random.Random) -> None:
        body = {"messages": [{"role": "user", "content": f"w{draw.randrange(150)}"}], "max_tokens": 8}
        msg_id = _streamed(http, body) if draw.random() < 0.3 else _plain(http, body)
        self.chats.add(msg_id)
        reward = draw.randrange(100) / 100
        answer = http.post("/feedback", json={"msg_ids": [msg_id], "reward": reward}).raise_for_status().json()
        assert answer["receipts"][0]["state"] == "applied", answer
        self.rewards[msg_id] = reward
        if draw.random() < 0.2:
            rewarded = set(self.rewards)
            http.post("/commit").raise_for_status()
            self.committed |= rewarded

    def check(self, ledger: Ledger) -> None:
        """Assert that the ledger contains everything acknowledged, once."""
        with ledger.read() as connection:
            rows = connection.execute(select(experiences.c.msg_id, experiences.c.reward, experiences.c.state)).all()
            said = connection.execute(select(signals.c.msg_id)).scalars().all()
        kept = {row.msg_id: row for row in rows}
        assert len(rows) == len(kept), "a row stands twice"
        assert self.chats <= kept.keys(), f"{len(self.chats - kept.keys())} acknowledged chats are missing"
        assert {name: kept[name].reward for name in self.rewards} == self.rewards
        assert len(said) == len(set(said)), "a signal stands twice"
        assert not [name for name in self.committed if kept[name].state == "RECORDED"], "a commit was lost"


def _plain(http: httpx.Client, body: dict[str, object]) -> str:
    reply = http.post("/v1/chat/completions", json=body).raise_for_status()
    return str(reply.json()["id"])


def _streamed(http: httpx.Client, body: dict[str, object]) -> str:
    msg_id, done = "", False
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            done = done or line == "data: [DONE]"
            if line.startswith("data: {"):
                msg_id = json.loads(line[6:]).get("id", msg_id)
    if not done:
        raise httpx.RemoteProtocolError("the stream ended without [DONE]")
    return msg_id
