"""Chats that name no version are divided among several adapters, run by run and conversation by conversation."""

from __future__ import annotations

from collections import Counter

import pytest
from sqlalchemy import select

from explorer_service.reload.poller import VersionPoller
from shared.errors import LedgerError
from shared.ledger.queries import list_versions
from shared.ledger.tables import experiences
from tests.support.adapters import engine, observed, publish_and_wait, said, state, watch_openings
from tests.support.scripted_adapters import name_of, publish_adapter
from tests.support.servers import RunningExplorer, served, wait_until


@pytest.fixture
def divided(explorer) -> RunningExplorer:
    """Version 1 has half of the chats, version 3 the other; 2 and 4 exist."""
    publish_and_wait(explorer, 1, 2)
    divide(explorer, {2: 1})
    publish_adapter(explorer, 3)
    publish_adapter(explorer, 4)
    divide(explorer, {1: 1, 3: 1})
    wait_until(lambda: served(explorer) in ("1", "3") and {1, 3} <= loaded(explorer))
    return explorer


def divide(explorer: RunningExplorer, weights: dict[int, float] | None) -> None:
    answer = explorer.http.put("/traffic", json={"weights": weights})
    assert answer.status_code == 200, answer.text


def loaded(explorer: RunningExplorer) -> set[int]:
    return {version for engine in explorer.deps.pool.serving for version in engine.versions}


def answering(explorer: RunningExplorer, chats: int = 60) -> Counter[str]:
    return Counter(served(explorer) for _ in range(chats))


def test_each_gets_its_share_and_rows_name_the_version(divided):
    answered = answering(divided)
    assert set(answered) == {"1", "3"} and min(answered.values()) > 10  # 30 of 60, within five standard deviations
    reply = divided.chat()
    row = select(experiences.c.version).where(experiences.c.msg_id == reply.json()["id"])
    version = divided.ledger.fetch(lambda c: c.execute(row).scalar())
    assert reply.headers["X-Flywheel-Version"] == str(version)
    assert said(reply) == f"v{version:06d}"
    assert 4 not in loaded(divided)  # nobody wants it


def test_all_turns_of_a_run_get_the_same_version_and_runs_differ(divided):
    of_run = {}
    for run in range(16):
        named = {"run_id": f"run {run}"}
        versions = {divided.chat(metadata=named).headers["X-Flywheel-Version"] for _ in range(3)}
        assert len(versions) == 1
        of_run[run] = versions.pop()
    assert set(of_run.values()) == {"1", "3"}


def test_runs_that_have_the_same_name_in_different_tasks_are_divided_too(divided):
    named = [{"task_id": f"t{number}", "run_id": "0"} for number in range(24)]
    assert {divided.chat(metadata=one).headers["X-Flywheel-Version"] for one in named} == {"1", "3"}


def test_a_conversation_stays_with_the_version_that_began_it(divided):
    begun = Counter[str]()
    for number in range(8):
        messages = [{"role": "user", "content": f"question {number}"}]
        first = divided.chat(messages=messages)
        begun[first.headers["X-Flywheel-Version"]] += 1
        for turn in range(4):
            messages += [first.json()["choices"][0]["message"], {"role": "user", "content": f"and {turn}?"}]
            reply = divided.chat(messages=messages)
            assert reply.headers["X-Flywheel-Version"] == first.headers["X-Flywheel-Version"]
            first = reply
    assert len(begun) == 2


def test_a_caller_who_names_a_version_gets_it(divided):
    assert {said(divided.chat(model="agent@1")) for _ in range(5)} == {"v000001"}
    assert said(divided.chat(model="agent@4")) == "v000004"


def test_when_a_version_is_rejected_its_chats_go_to_the_others_without_a_failure(divided):
    assert divided.http.post("/rollback", json={"to": 2}).status_code == 200
    wait_until(lambda: 3 not in loaded(divided) and served(divided) == "2")  # until 2 is loaded, 1 answers
    assert set(answering(divided, 10)) == {"2"}
    assert state(divided, 3) == "REJECTED"


def test_a_version_that_fails_its_proof_gets_no_chats(divided, scripted_engine):
    scripted_engine.script.wrong_probe_for.add(name_of(divided, 4))
    divide(divided, {1: 1, 4: 1})
    wait_until(lambda: state(divided, 4) == "REJECTED")
    assert set(answering(divided, 10)) == {"1"}


def test_a_candidate_is_promoted_and_the_newest_serves_again_when_an_operator_wants_it(divided):
    divided.http.post("/versions/3/promote")
    wait_until(lambda: answering(divided, 5) == {"3": 5})
    wait_until(lambda: loaded(divided) == {0, 3})
    assert {row.state for row in divided.ledger.fetch(list_versions) if row.version == 3} == {"SERVING"}
    divide(divided, None)
    wait_until(lambda: answering(divided, 5) == {"4": 5})


@pytest.mark.parametrize("room, more", [(6, "a higher engine.max_loras"), (1, "engine.max_loras and engine.max_cpu_")])
def test_more_versions_than_an_engine_computes_at_once_are_refused(divided, start, room, more):
    divided.stop()
    small = start(room)
    answer = small.http.put("/traffic", json={"weights": {1: 1, 2: 1, 3: 1}})
    assert answer.status_code == 409 and more in answer.text
    divide(small, {1: 1, 2: 1})


def test_two_explorers_give_the_turns_of_a_run_to_the_same_version(divided, start):
    other = start()
    wait_until(lambda: {1, 3} <= loaded(other))
    of_run = set()
    for run in range(10):
        named = {"run_id": f"run {run}"}
        versions = {e.chat(metadata=named).headers["X-Flywheel-Version"] for e in (divided, other)}
        assert len(versions) == 1
        of_run |= versions
    assert of_run == {"1", "3"}
    messages = [{"role": "user", "content": "a conversation at both"}]
    first = divided.chat(messages=messages)
    messages += [first.json()["choices"][0]["message"], {"role": "user", "content": "and now?"}]
    for explorer in (other, divided, other):
        assert explorer.chat(messages=messages).headers["X-Flywheel-Version"] == first.headers["X-Flywheel-Version"]


def test_an_engine_that_restarts_has_all_versions_with_shares_again_before_it_takes_chats(divided, scripted_engine):
    opened_with = watch_openings(divided)
    scripted_engine.die()
    wait_until(lambda: bool(opened_with))
    assert opened_with == [{0, 1, 3}]


def test_while_versions_cannot_be_read_from_the_ledger_chats_are_divided_as_before(
    divided, scripted_engine, monkeypatch
):
    loads = len(scripted_engine.script.ever_loaded)
    asked: list[VersionPoller] = []

    def is_away(poller: VersionPoller) -> LedgerError:
        asked.append(poller)
        return LedgerError("the database is unavailable")

    with monkeypatch.context() as away:
        away.setattr(VersionPoller, "_query", is_away)
        wait_until(lambda: len(asked) > 2)
        assert set(answering(divided, 20)) == {"1", "3"}
    assert set(answering(divided, 20)) == {"1", "3"}
    assert len(scripted_engine.script.ever_loaded) == loads


def test_an_explorer_that_starts_later_divides_them_too(divided, start, scripted_engine):
    divided.stop()
    again = start()
    wait_until(lambda: {1, 3} <= loaded(again))
    assert set(answering(again)) == {"1", "3"}


def test_a_version_with_a_share_stays_while_requests_of_the_one_that_led_before_end(start, scripted_engine):
    explorer = start(room=1)
    publish_and_wait(explorer, 1, 2, 3)
    divide(explorer, {1: 1, 2: 1})
    wait_until(lambda: {1, 2} <= loaded(explorer) and engine(explorer).version == 1)
    scripted_engine.script.streams_wait = True
    asked = {"messages": [], "stream": True, "model": "agent@1"}
    with explorer.http.stream("POST", "/chat", json=asked) as reply, observed(explorer) as rounds:
        divide(explorer, {3: 2, 2: 1})
        wait_until(lambda: engine(explorer).version == 3)
        rounds.clear()
        wait_until(lambda: len(rounds) > 3)
        assert all(2 in versions for versions in rounds)
        scripted_engine.script.streams_wait = False
        reply.read()
    wait_until(lambda: loaded(explorer) == {0, 2, 3})
