"""Feedback and commit, over real HTTP."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable

import pytest
from sqlalchemy import select, update

from shared.ledger import transitions
from shared.ledger.tables import experiences, signals
from shared.reward import Lesson
from tests.support.forms import one_database
from tests.support.processes import run_here
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, keys_of_roles, wait_until


def feedback(explorer: RunningExplorer, **body: object):
    return explorer.http.post("/feedback", json=body)


def new_message(explorer: RunningExplorer, **body: object) -> str:
    return explorer.chat(**body).json()["id"]


def test_every_id_gets_an_honest_receipt(explorer):
    known = new_message(explorer)
    reply = feedback(explorer, msg_ids=[known, "chatcmpl-nobody"], reward=0.8, task_id=None, run_id=None)
    assert reply.status_code == 200
    assert reply.json() == {
        "status": "success",
        "applied": 1,
        "receipts": [{"msg_id": known, "state": "applied"}, {"msg_id": "chatcmpl-nobody", "state": "unknown"}],
    }
    assert feedback(explorer, msg_ids=["chatcmpl-nobody"], reward=1).status_code == 404


def test_a_later_reward_replaces_an_earlier_one_until_the_row_is_leased(explorer):
    known = new_message(explorer)
    states = [feedback(explorer, msg_ids=[known], reward=r).json()["receipts"][0]["state"] for r in (0.1, 0.1, 0.9)]
    assert states == ["applied", "duplicate", "updated"]
    with explorer.ledger.write() as connection:
        connection.execute(update(experiences).values(state="CONSUMED", taught=Lesson.REWARD))
    assert feedback(explorer, msg_ids=[known], reward=0).json()["receipts"][0]["state"] == "already_trained"
    with explorer.ledger.read() as connection:
        assert connection.execute(select(experiences.c.reward)).scalar() == 0.9
        assert [row.value for row in connection.execute(select(signals).order_by(signals.c.id))] == [0.1, 0.9, 0.0]


def test_feedback_reaches_one_choice_a_task_or_a_run(explorer):
    several = new_message(explorer, n=2, metadata={"task_id": "t", "run_id": 1})
    other = new_message(explorer, metadata={"task_id": "t", "run_id": "2"})
    feedback(explorer, msg_ids=[f"{several}#1"], reward=0.5)
    assert {r["msg_id"] for r in feedback(explorer, task_id="t", rating="up").json()["receipts"]} == {several, other}
    assert feedback(explorer, task_id="t", run_id=1, reward=0.25).json()["applied"] == 1
    with explorer.ledger.read() as connection:
        rewards = connection.execute(select(experiences.c.reward).order_by(experiences.c.id)).scalars().all()
    assert rewards == [0.25, 0.25, 1.0]


def test_an_idempotency_key_gets_the_first_answer_again(explorer):
    known = new_message(explorer)
    request = {"json": {"msg_ids": [known], "reward": 1}, "headers": {"Idempotency-Key": "k1"}}
    first = explorer.http.post("/feedback", **request)
    assert explorer.http.post("/feedback", **request).content == first.content


@one_database
def test_feedback_that_says_nothing_or_nonsense_is_refused(explorer):
    for body in (
        b"",
        b"{}",
        b'{"msg_ids": ["a"]}',
        b'{"reward": 1}',
        b'{"msg_ids": ["a"], "reward": NaN}',
        b'{"msg_ids": ["a"], "reward": 1e999}',
        b'{"msg_ids": ["a"], "reward": "good"}',
        b'{"msg_ids": "a", "reward": 1}',
        b'{"msg_ids": ["a"], "rating": "meh"}',
        b'{"task_id": "a\\u0000", "reward": 1}',
    ):
        reply = explorer.http.post("/feedback", content=body)
        assert reply.status_code == 400, body
        assert reply.json()["error"]["message"], body


@one_database
def test_a_wrong_field_is_the_param_of_the_error(explorer):
    for path, body, field in (
        ("/feedback", {"msg_ids": ["a"], "reward": "good"}, "reward"),
        ("/feedback", {"msg_ids": ["a"], "rating": "UP"}, "rating"),
        ("/feedback", {"msg_ids": ["a", 1], "reward": 1}, "msg_ids"),
        ("/feedback", {"msg_ids": ["a"], "metrics": {"x": None}}, "metrics"),
        ("/feedback", {"msg_ids": ["a"], "metrics": {"x\0": 1}}, "metrics"),
        ("/commit", {"time_threshold": "2026-01-01"}, "time_threshold"),
        ("/commit", [], None),
    ):
        reply = explorer.http.post(path, json=body)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == field, body


@one_database
def test_the_error_of_a_wrong_choice_names_the_right_ones(explorer):
    for given, message in (
        ({"rating": "UP"}, "rating must be up or down"),
        ({"rating": ""}, "rating must be up or down"),
        ({"reward": 1, "scope": "run"}, "scope must be message or conversation"),
    ):
        reply = feedback(explorer, msg_ids=["chatcmpl-1"], **given)
        assert reply.status_code == 400 and reply.json()["error"]["message"] == message, given


def test_an_empty_idempotency_key_is_none(explorer):
    known = new_message(explorer)
    for reward in (1, 2):
        reply = explorer.http.post(
            "/feedback", json={"msg_ids": [known], "reward": reward}, headers={"Idempotency-Key": ""}
        )
        assert reply.status_code == 200, reply.text


def test_fields_that_feedback_and_commit_do_not_have_are_named_in_the_answer(explorer):
    name = new_message(explorer)
    given = {"msg_ids": [name], "reward": 1.0, "scop": "conversation", "run": "r7"}
    assert feedback(explorer, **given).json()["ignored"] == ["scop", "run"]
    assert "ignored" not in feedback(explorer, msg_ids=[name], reward=0.5).json()
    assert explorer.http.post("/commit", json={"taskid": "t"}).json()["ignored"] == ["taskid"]
    for body in (b"", b"null", b"{}"):
        assert "ignored" not in explorer.http.post("/commit", content=body).json()


def test_a_field_whose_name_is_not_utf_8_is_refused_before_anything_is_applied(explorer):
    name = new_message(explorer).encode()
    feedback(explorer, msg_ids=[name.decode()], rating="up").raise_for_status()
    said = b'{"msg_ids": ["%b"], "reward": 1, "\xff": 2}' % name
    assert explorer.http.post("/feedback", content=said).status_code == 400
    assert explorer.http.post("/commit", content=b'{"\xff": 2}').status_code == 400
    with explorer.ledger.read() as connection:
        assert connection.execute(select(signals.c.kind)).scalars().all() == ["rating"]
        assert connection.execute(select(experiences.c.state)).scalar() == "RECORDED"


def test_commit_makes_rewarded_rows_of_the_scope_ready(explorer):
    first, second = new_message(explorer, metadata={"task_id": "a"}), new_message(explorer, metadata={"task_id": "b"})
    new_message(explorer)
    feedback(explorer, msg_ids=[first, second], reward=1)
    assert explorer.http.post("/commit", json={"task_id": "a", "run_id": None, "time_threshold": None}).json() == {
        "status": "success",
        "committed": 1,
        "ready": 1,
    }
    assert explorer.http.post("/commit", json={"time_threshold": 1000 * (time.time() - 60)}).json()["committed"] == 0
    assert explorer.http.post("/commit").json() == {"status": "success", "committed": 1, "ready": 2}
    assert explorer.http.post("/commit").json() == {"status": "success", "committed": 0, "ready": 2}
    assert explorer.http.get("/status").json()["rows"]["READY"] == 2


def java_training_client(explorer: RunningExplorer, path: str, body: dict[str, object]) -> dict[str, object]:
    """As AgentScope Java's training client posts: OkHttp, no Accept header, no key; its parser is a strict one."""
    connection = http.client.HTTPConnection(explorer.http.base_url.host, explorer.http.base_url.port, timeout=120)
    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "okhttp/5.3.2"}
    connection.request("POST", path, json.dumps(body).encode(), {**headers, "Connection": "Keep-Alive"})
    reply = connection.getresponse()
    content = reply.read()
    connection.close()
    assert 200 <= reply.status < 300, content
    answer: dict[str, object] = json.loads(content)
    assert set(answer) <= {"status", "message"}, "a field that it does not know is an exception in it"
    return answer


def test_agentscope_javas_training_client_is_understood(explorer):
    """String run ids, nulls in commit, no key."""
    known = new_message(explorer, model="agent", stream=False)
    said = {"msg_ids": [known], "reward": 0.75, "task_id": "b5c3-task", "run_id": "0"}
    assert java_training_client(explorer, "/feedback", said) == {"status": "success"}
    theirs = select(experiences.c.msg_id, experiences.c.task_id, experiences.c.run_id)
    with explorer.ledger.read() as connection:
        assert list(connection.execute(theirs)) == [(known, "b5c3-task", "0")], "its chats name no task: feedback does"
    nulls = {"task_id": None, "run_id": None, "time_threshold": None}
    assert java_training_client(explorer, "/commit", nulls) == {"status": "success"}
    with explorer.ledger.read() as connection:
        assert [tuple(row) for row in connection.execute(select(experiences.c.reward, experiences.c.state))] == [
            (0.75, "READY")
        ]
    full = explorer.http.post("/commit", json=nulls, headers={"User-Agent": "okhttp/5.3.2", "Accept": "*/*"})
    assert full.json() == {"status": "success", "committed": 0, "ready": 1}


def test_agentscope_javas_training_client_gets_the_error_when_all_targets_are_unknown(explorer):
    body = b'{"msg_ids": ["unknown"], "reward": 1}'
    request = explorer.http.build_request("POST", "/feedback", content=body, headers={"User-Agent": "okhttp/5.3.2"})
    del request.headers["Accept"]
    answer = explorer.http.send(request)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_target")


def test_keys_and_roles_decide_who_may_do_what(
    scripted_engine: ScriptedEngine, start_explorer: Callable[..., RunningExplorer], monkeypatch: pytest.MonkeyPatch
):
    explorer = start_explorer([scripted_engine.url], keys=keys_of_roles(monkeypatch)).wait_ready()
    asked = {
        "chat": ("/v1/chat/completions", {"messages": []}),
        "feedback": ("/commit", {}),
        "admin": ("/versions/1/promote", {}),
    }

    def status(path: str, body: dict, key: str | None) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return explorer.http.post(path, json=body, headers=headers).status_code

    for name, (path, body) in asked.items():
        assert status(path, body, None) == 401
        assert status(path, body, "wrong") == 401
        for role in ("chat", "feedback"):
            assert status(path, body, f"secret-key-of-{role}") == (200 if role == name else 403)
        assert status(path, body, "secret-key-of-admin") == (409 if name == "admin" else 200)


def rewards(explorer: RunningExplorer) -> list[float | None]:
    with explorer.ledger.read() as connection:
        return list(connection.execute(select(experiences.c.reward).order_by(experiences.c.id)).scalars())


def test_ratings_and_metrics_become_a_reward_by_the_configured_rule(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], reward={"down": -1, "metrics": {"stars": 0.1}}).wait_ready()
    known = new_message(explorer)
    assert feedback(explorer, msg_ids=[known], rating="down").json()["receipts"][0]["state"] == "applied"
    assert feedback(explorer, msg_ids=[known], metrics={"stars": 5, "seconds": 3}).json()["applied"] == 1
    assert rewards(explorer) == [-0.5]
    assert feedback(explorer, msg_ids=[known], metrics={"stars": 5}).json()["receipts"][0]["state"] == "duplicate"


def test_a_changed_rule_is_applied_to_what_was_said_before(explorer):
    rated, untouched = new_message(explorer), new_message(explorer)
    feedback(explorer, msg_ids=[rated], rating="down")
    rule = explorer.config.reward.model_copy(update={"down": -2.0})
    assert run_here(explorer.config.model_copy(update={"reward": rule}), "rewards") == 0
    assert rewards(explorer) == [-2.0, None]
    assert untouched


def test_a_reward_outside_the_accepted_range_is_refused(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], reward={"accept": [0, 1]}).wait_ready()
    known = new_message(explorer)
    assert feedback(explorer, msg_ids=[known], reward=1.5).status_code == 400
    assert feedback(explorer, msg_ids=[known], reward=1.0).status_code == 200


def test_rewarded_rows_are_committed_from_a_clock_and_unrewarded_ones_expire(
    scripted_engine, start_explorer, monkeypatch
):
    monkeypatch.setattr("explorer_service.housekeeping.EXPIRE_EVERY_S", 0.1)
    explorer = start_explorer([scripted_engine.url], commit_every_s=0.05, expire_after_s=3600.0).wait_ready()
    rated, other = new_message(explorer), new_message(explorer)
    feedback(explorer, msg_ids=[rated], reward=1)
    with explorer.ledger.write() as connection:
        connection.execute(update(experiences).values(created_at=experiences.c.created_at - 7200.0))
    wait_until(lambda: states(explorer) == ["READY", "DISCARDED"])
    assert feedback(explorer, msg_ids=[other], reward=1).json()["receipts"][0]["state"] == "expired"


def test_rows_that_the_clock_commits_are_counted_beside_those_of_requests(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], commit_every_s=0.05).wait_ready()
    for _ in range(3):
        feedback(explorer, msg_ids=[new_message(explorer)], reward=1)
    wait_until(lambda: states(explorer) == ["READY"] * 3)
    explorer.http.post("/commit")
    wait_until(lambda: "flywheel_commit_rows_total 3.0" in explorer.http.get("/metrics").text)


def states(explorer: RunningExplorer) -> list[str]:
    with explorer.ledger.read() as connection:
        return list(connection.execute(select(experiences.c.state).order_by(experiences.c.id)).scalars())


def test_feedback_given_while_a_trainer_holds_the_row_counts_when_it_is_given_again(explorer):
    known = new_message(explorer)
    feedback(explorer, msg_ids=[known], reward=1)
    explorer.http.post("/commit")
    with explorer.ledger.write() as connection:
        assert transitions.claim(connection, owner="t", at_least=1, at_most=1, lease_s=60)
    assert feedback(explorer, msg_ids=[known], reward=0).json()["receipts"][0]["state"] == "already_trained"
    with explorer.ledger.write() as connection:
        assert transitions.give_back(connection, owner="t") == 1
    assert feedback(explorer, msg_ids=[known], reward=0).json()["receipts"][0]["state"] == "updated"
    with explorer.ledger.read() as connection:
        assert connection.execute(select(experiences.c.reward)).scalar_one() == 0.0
