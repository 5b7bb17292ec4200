"""An operator goes back to an earlier version while agents chat: engine and trainer follow without a restart."""

from __future__ import annotations

import threading

import httpx
import pytest
from sqlalchemy import select

from shared.ledger.queries import list_versions
from shared.ledger.tables import experiences
from tests.e2e.conftest import Live
from tests.support.processes import wait_for

pytestmark = pytest.mark.engine
QUESTION = [{"role": "user", "content": "hello w1 w2"}]


def greedy(live: Live, version: int) -> list[float]:
    """The logprobs of a greedy answer, without a record, by this version."""
    body = {"messages": QUESTION, "max_tokens": 12, "temperature": 0, "logprobs": True, "store": False}
    answer = live.chat(model=f"agent@{version}", **body)
    assert answer["version"] == version
    return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]


def test_the_engine_and_the_trainer_go_back_under_chats_and_go_on_from_there(live, ledger):
    good = live.learn(8)
    before = greedy(live, good)
    bad = live.learn(8)
    assert bad > good
    failed: list[str] = []
    answered: list[int] = []
    done = threading.Event()

    def chat() -> None:
        with httpx.Client(base_url=str(live.http.base_url), timeout=120) as http:
            while not done.is_set():
                reply = http.post("/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 8})
                if reply.status_code == 200:
                    answered.append(int(reply.headers["X-Flywheel-Version"]))
                else:
                    failed.append(reply.text)

    agents = [threading.Thread(target=chat) for _ in range(2)]
    for agent in agents:
        agent.start()
    answer = live.http.post("/rollback", json={"to": good}).raise_for_status().json()
    assert answer["rejected"] == list(range(good + 1, bad + 1)) and answer["trainers"] == {"trainer": True}
    wait_for(lambda: live.status()["versions"]["serving"] == good, "the earlier version in service", 120)
    at = len(answered)
    wait_for(lambda: len(answered) > at + 10, "chats", 120)
    done.set()
    for agent in agents:
        agent.join(120)
    assert not failed and set(answered) <= {good, bad} and set(answered[-5:]) == {good}
    assert greedy(live, good) == pytest.approx(before, abs=1e-4)

    better = live.learn(8)
    with ledger.read() as connection:
        rows = {row.version: row for row in list_versions(connection)}
        held = connection.execute(select(experiences.c.id).where(experiences.c.state == "LEASED")).all()
    line = [better]
    while line[-1] > good:
        parent = rows[line[-1]].parent
        assert parent is not None
        line.append(parent)
    assert line[-1] == good and bad not in line, "what was learned later descends from a rejected version"
    assert not held
