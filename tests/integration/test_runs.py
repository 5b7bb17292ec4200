"""Runs named by the path, and what is shown of a run."""

from __future__ import annotations

import hashlib

import pytest
from sqlalchemy import select

from shared.ledger.tables import experiences
from tests.support.wire import CHAT_BODY, connect, post, read_answer

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def names(explorer) -> list[tuple[str | None, str | None]]:
    with explorer.ledger.read() as connection:
        query = select(experiences.c.task_id, experiences.c.run_id).order_by(experiences.c.id)
        return [tuple(row) for row in connection.execute(query)]


@pytest.mark.parametrize(
    ("surface", "body"),
    [("/v1/chat/completions", CHAT), ("/chat", CHAT), ("/v1/completions", {"prompt": "hi"})],
)
def test_the_path_names_task_and_run_on_every_recorded_surface(explorer, surface, body):
    explorer.http.post(f"/run/shop%2Fdesk%201/a%25b{surface}", json=body).raise_for_status()
    explorer.http.post(f"/run/K%C3%B6ln/0{surface}", json={**body, "metadata": {"task_id": "x"}}).raise_for_status()
    assert names(explorer) == [("shop/desk 1", "a%b"), ("Köln", "0")]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/run/t/v1/chat/completions", 404),
        ("/run/a/b/c/v1/chat/completions", 404),
        ("/run//r/v1/chat/completions", 404),
        ("/run/%FF/r/v1/chat/completions", 400),
        ("/run/a%00/r/v1/chat/completions", 400),
        (f"/run/{'a' * 401}/r/v1/chat/completions", 400),
        (f"/run/t/{'𠀀' * 301}/v1/chat/completions", 400),
        ("/run/t/r/v1/responses", 404),
    ],
)
def test_a_path_that_names_no_run_is_refused_and_nothing_is_recorded(explorer, path, status):
    reply = explorer.http.post(path, json=CHAT)
    assert reply.status_code == status
    assert reply.json()["error"]["message"]
    assert names(explorer) == []


def test_spaces_after_a_name_in_a_header_are_not_part_of_it(explorer):
    with connect(explorer, post("/chat", CHAT_BODY, "X-Flywheel-Task: a b ", "X-Flywheel-Run:\t0 \t")) as opened:
        assert read_answer(opened).status == 200
    assert names(explorer) == [("a b", "0")]


def test_a_run_is_shown_with_its_messages_their_state_rewards_and_tokens(explorer):
    several = explorer.http.post("/run/t/1/v1/chat/completions", json={**CHAT, "n": 2}).json()["id"]
    last = explorer.http.post("/run/t/1/v1/chat/completions", json=CHAT).json()["id"]
    explorer.http.post("/run/t/2/v1/chat/completions", json=CHAT).raise_for_status()
    explorer.http.post("/feedback", json={"task_id": "t", "run_id": "1", "reward": 0.5}).raise_for_status()
    explorer.http.post("/feedback", json={"msg_ids": [last], "reward": 0.25}).raise_for_status()
    shown = explorer.http.get("/runs", params={"task_id": "t", "run_id": "1"}).json()
    row = {"run_id": "1", "version": 0, "state": "RECORDED", "outcome": 0.5, "tokens": {"prompt": 4, "reply": 3}}
    assert shown == {
        "rows": [
            {**row, "msg_id": f"{several}#0", "reward": 0.5},
            {**row, "msg_id": f"{several}#1", "reward": 0.5},
            {**row, "msg_id": last, "reward": 0.25},
        ],
        "next": None,
    }
    assert len(explorer.http.get("/runs", params={"task_id": "t"}).json()["rows"]) == 4
    assert explorer.http.get("/runs", params={"task_id": "nobody"}).json() == {"rows": [], "next": None}


def test_the_name_of_a_shown_row_reaches_that_row_alone(explorer):
    explorer.http.post("/run/t/1/v1/chat/completions", json={**CHAT, "n": 3}).raise_for_status()
    explorer.http.post("/run/t/1/v1/chat/completions", json=CHAT).raise_for_status()
    shown = [row["msg_id"] for row in explorer.http.get("/runs?task_id=t").json()["rows"]]
    for number, name in reversed(list(enumerate(shown))):
        explorer.http.post("/feedback", json={"msg_ids": [name], "reward": number / 10}).raise_for_status()
    assert [row["reward"] for row in explorer.http.get("/runs?task_id=t").json()["rows"]] == [0.0, 0.1, 0.2, 0.3]


def test_a_long_run_is_shown_in_parts(explorer, monkeypatch):
    monkeypatch.setattr("explorer_service.runs.MAX_ROWS", 2)
    chats = [explorer.http.post("/run/t/1/chat", json=CHAT).json()["id"] for _ in range(5)]
    found, after = [], 0
    while after is not None:
        part = explorer.http.get("/runs", params={"task_id": "t", "run_id": "1", "after": after}).json()
        found += [row["msg_id"] for row in part["rows"]]
        after = part["next"]
    assert found == chats


@pytest.mark.parametrize(
    "query", ["", "run_id=1", "task_id=t&after=-1", "task_id=t&after=x", "task_id=%00", f"task_id=t&after={'9' * 30}"]
)
def test_a_question_about_no_run_is_refused(explorer, query):
    reply = explorer.http.get(f"/runs?{query}")
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


def test_an_empty_name_is_none(explorer):
    ids = [explorer.chat(**more).json()["id"] for more in ({"metadata": {"task_id": "", "run_id": ""}}, {})]
    said = {"msg_ids": ids, "task_id": "", "run_id": "", "reward": 1}
    assert explorer.http.post("/feedback", json=said).json()["applied"] == 2
    assert names(explorer) == [(None, None), (None, None)]
    assert explorer.http.post("/feedback", json={**said, "msg_ids": []}).status_code == 400
    assert explorer.http.get("/runs?task_id=&run_id=").status_code == 400
    explorer.http.post("/run/t/1/chat", json=CHAT).raise_for_status()
    assert len(explorer.http.get("/runs?task_id=t&run_id=").json()["rows"]) == 1
    assert explorer.http.post("/commit", json={"task_id": "", "run_id": ""}).json()["committed"] == 2


def test_a_key_sees_the_runs_of_its_own_group_alone(scripted_engine, start_explorer):
    def hashed(name: str, role: str, group: str) -> dict[str, str]:
        digest = hashlib.sha256(f"{name:*<16}".encode()).hexdigest()
        return {"sha256": digest, "name": name, "role": role, "group": group}

    keys = [hashed("chat-a", "chat", "a"), hashed("rate-a", "feedback", "a"), hashed("rate-b", "feedback", "b")]
    explorer = start_explorer([scripted_engine.url], keys=keys).wait_ready()

    def ask(key: str, method: str, path: str, **more):
        return explorer.http.request(method, path, headers={"Authorization": f"Bearer {key:*<16}"}, **more)

    ask("chat-a", "POST", "/run/t/1/chat", json=CHAT).raise_for_status()
    assert len(ask("rate-a", "GET", "/runs?task_id=t").json()["rows"]) == 1
    assert ask("rate-b", "GET", "/runs?task_id=t").json()["rows"] == []
    assert ask("chat-a", "GET", "/runs?task_id=t").status_code == 403
    assert explorer.http.get("/runs?task_id=t").status_code == 401
