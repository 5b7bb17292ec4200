"""Runs of the same name in several groups of keys: none waits for, commits, or counts as a run of another group."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import Connection, select

from shared.config import RewardConfig
from shared.ledger import queries, transitions
from shared.ledger.conditions import UNGROUPED
from shared.ledger.tables import experiences
from shared.reward import Signal
from tests.integration.test_keys import as_key, hashed
from tests.support.samples import sample
from tests.support.servers import wait_joined
from tests.support.waiting_feedback import feedback_that_waits

KEYS = [
    hashed("chats", "chat"),
    hashed("chats-b", "chat", group="b"),
    hashed("rates", "feedback"),
    hashed("rates-b", "feedback", group="b"),
    hashed("rates-all", "feedback", all_groups=True),
]


def record_run(connection: Connection, group: str | None, run: str, turns: int = 1) -> None:
    names = [f"{group} {run} {turn}" for turn in range(turns)]
    rows = [sample(name, task_id="t", run_id=run, key_group=group) for name in names]
    transitions.record(connection, rows)


def reward_run(connection: Connection, group: str | None, run: str) -> None:
    given = {"signals": [Signal("reward", value=1.0)], "rule": RewardConfig(), "key_group": group or UNGROUPED}
    transitions.apply_feedback(connection, msg_ids=[], task_id="t", run_id=run, **given)


def states(connection: Connection) -> set[tuple[str | None, str]]:
    return {tuple(row) for row in connection.execute(select(experiences.c.key_group, experiences.c.state))}


@pytest.mark.parametrize(("rewarded", "other"), [("shop", "thief"), (None, "thief"), ("thief", None)])
def test_a_commit_of_all_groups_takes_a_rewarded_run_whole_and_nothing_of_another_groups_run(ledger, rewarded, other):
    """The commit by the clock is one."""
    with ledger.write() as connection:
        for group in (rewarded, other):
            record_run(connection, group, "0", turns=2)
        reward_run(connection, rewarded, "0")
        assert transitions.commit(connection) == (2, 2)
        assert states(connection) == {(rewarded, "READY"), (other, "RECORDED")}
        reward_run(connection, other, "0")
        assert transitions.commit(connection) == (2, 4)


def test_runs_of_another_group_do_not_complete_a_group_of_runs_that_is_claimed_together(ledger):
    asked = {"owner": "t", "at_least": 1, "at_most": 64, "lease_s": 60.0}
    asked |= {"whole": "task", "runs_of_task": 2, "wait_s": None}

    def end_run(connection: Connection, group: str, run: str) -> None:
        record_run(connection, group, run)
        reward_run(connection, group, run)
        transitions.commit(connection)

    with ledger.write() as connection:
        end_run(connection, "shop", "0")
        end_run(connection, "thief", "1")
        assert transitions.claim(connection, **asked) is None
        end_run(connection, "shop", "1")
        batch = transitions.claim(connection, **asked)
        assert batch is not None
        assert [row.msg_id for row in queries.load_lease(connection, batch).rows] == ["shop 0 0", "shop 1 0"]


def test_a_key_of_all_groups_commits_a_rewarded_run_without_another_groups_run_of_that_name(
    scripted_engine, start_explorer
):
    explorer = start_explorer([scripted_engine.url], keys=KEYS).wait_ready()
    for key in ("chats", "chats-b"):
        explorer.http.post("/run/t/1/chat", json={"messages": []}, headers=as_key(key)).raise_for_status()

    def commit() -> int:
        return explorer.http.post("/commit", headers=as_key("rates-all")).raise_for_status().json()["committed"]

    def rate(key: str) -> int:
        body = {"task_id": "t", "run_id": "1", "reward": 1}
        return explorer.http.post("/feedback", json=body, headers=as_key(key)).raise_for_status().json()["applied"]

    assert (rate("rates-b"), commit()) == (1, 1)
    assert explorer.ledger.fetch(states) == {("b", "READY"), (None, "RECORDED")}
    assert (rate("rates"), commit()) == (1, 1)


@pytest.mark.parametrize("explorers", [1, 2])
def test_feedback_waits_for_the_streams_of_its_group_and_for_none_of_another_in_a_run_of_that_name(
    scripted_engine, start_explorer, explorers
):
    """The stream is at the first explorer; the last one is asked."""
    started = [start_explorer([scripted_engine.url], keys=KEYS, engine_wait_s=60.0) for _ in range(explorers)]
    first, *_, asked = [started[0], *(explorer.wait_ready() for explorer in started)]
    if explorers > 1:
        wait_joined(started)
    path, about = "/run/t/1/chat", {"task_id": "t", "run_id": "1", "reward": 1}
    asked.http.post(path, json={"messages": []}, headers=as_key("chats-b")).raise_for_status()
    scripted_engine.script.streams_wait = True
    body = {"messages": [], "stream": True}
    with first.http.stream("POST", path, json=body, headers=as_key("chats")) as reply:
        lines = reply.iter_lines()
        msg_id = json.loads(next(line for line in lines if line.startswith("data: {"))[6:])["id"]
        answer = asked.http.post("/feedback", json=about, headers=as_key("rates-b"), timeout=60).json()
        assert answer["applied"] == 1
        asked.http.headers.update(as_key("rates"))
        with feedback_that_waits(asked, **about) as answers:
            scripted_engine.script.streams_wait = False
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert answers[0]["receipts"] == [{"msg_id": msg_id, "state": "applied"}]
