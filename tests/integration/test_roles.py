"""Who may do what, over all routes: roles, each key's limit, and what one caller learns of others and of engines."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from sqlalchemy import select

from explorer_service.app import ROUTES
from shared.ledger.tables import decisions
from tests.integration.test_conversation import FIRST, go_on, rows, turn
from tests.integration.test_engines import lose_core
from tests.integration.test_keys import as_key, hashed, within_a_minute  # noqa: F401 — a fixture
from tests.integration.test_openapi import read_document
from tests.support.postgres import sqlite_alone
from tests.support.servers import RunningExplorer, publish, served, wait_until

pytestmark = pytest.mark.usefixtures("patient_health")
database_url = sqlite_alone  # nothing here depends on the database

ROLES = ("chat", "feedback", "admin")
REFUSALS = {  # of who may not
    **dict.fromkeys(ROLES, (403, "wrong_role")),
    "unknown": (401, "invalid_api_key"),
    "none": (401, "no_key"),
}
ALL, READERS = set(REFUSALS), set(ROLES)
CHATTERS, RATERS, OPERATORS = {"chat", "admin"}, {"feedback", "admin"}, {"admin"}
MAY = {
    "POST /v1/chat/completions": CHATTERS,
    "POST /chat": CHATTERS,
    "POST /v1/completions": CHATTERS,
    "POST /run/{task}/{run}/v1/chat/completions": CHATTERS,
    "POST /run/{task}/{run}/chat": CHATTERS,
    "POST /run/{task}/{run}/v1/completions": CHATTERS,
    "POST /feedback": RATERS,
    "POST /commit": RATERS,
    "POST /v1/responses": CHATTERS,
    "POST /v1/messages": CHATTERS,
    "POST /tokenize": CHATTERS,
    "POST /detokenize": CHATTERS,
    "GET /v1/models": READERS,
    "GET /v1/models/{model}": READERS,
    "GET /run/{task}/{run}/v1/models": READERS,
    "GET /run/{task}/{run}/v1/models/{model}": READERS,
    "GET /health": ALL,
    "GET /ready": ALL,
    "GET /metrics": ALL,
    "GET /runs": RATERS,
    "GET /versions": READERS,
    "GET /status": READERS,
    "PUT /traffic": OPERATORS,
    "POST /versions/{version}/promote": OPERATORS,
    "POST /rollback": OPERATORS,
}
NOT_LIMITED = {route for route, who in MAY.items() if who == ALL or "/v1/models" in route}
BODY = {"messages": FIRST, "prompt": "hi", "msg_ids": ["unknown"], "reward": 1, "weights": None, "to": 0}


def send(explorer: RunningExplorer, route: str, key: str | None) -> httpx.Response:
    """A valid request to a route. None: without a key."""
    method, path = route.split()
    for name, value in {"task": "t", "run": "1", "model": "agent", "version": "0"}.items():
        path = path.replace(f"{{{name}}}", value)
    content: dict[str, Any] = {"params": {"task_id": "t"}} if method == "GET" else {"json": BODY}
    return explorer.http.request(method, path, headers=as_key(key) if key else {}, **content)


def is_served(reply: httpx.Response, who: str) -> bool:
    if reply.status_code not in (401, 403):
        return True
    assert (reply.status_code, reply.json()["error"]["code"]) == REFUSALS[who]
    return False


def test_the_roles_of_every_route_are_known_here():
    assert MAY.keys() == {f"{method} {path.replace(':path}', '}')}" for method, path, _ in ROUTES}


def test_the_document_says_which_routes_need_no_key_and_which_an_operators():
    paths = read_document()["paths"]
    document = {
        f"{method.upper()} {path}": about for path, methods in paths.items() for method, about in methods.items()
    }
    assert {route for route, about in document.items() if about.get("security") == [{}]} == {
        route for route, who in MAY.items() if who == ALL
    }
    assert {route for route, about in document.items() if "(role admin)" in about["summary"]} == {
        route for route, who in MAY.items() if who == OPERATORS
    }


def test_a_key_may_do_what_its_role_says_and_nothing_else(scripted_engine, start_explorer):
    keys = [hashed(role, role) for role in ROLES]
    explorer = start_explorer([scripted_engine.url], keys=keys).wait_ready()
    found = {
        route: {who for who in REFUSALS if is_served(send(explorer, route, None if who == "none" else who), who)}
        for route in MAY
    }
    assert found == MAY


@pytest.mark.usefixtures("within_a_minute")
def test_a_keys_limit_holds_on_every_route_that_reads_the_ledger_writes_or_asks_an_engine(
    scripted_engine, start_explorer
):
    names = {route: f"k{number}" for number, route in enumerate(MAY)}
    keys = [hashed(name, "admin", requests_per_minute=2) for name in names.values()]
    explorer = start_explorer([scripted_engine.url], keys=keys).wait_ready()
    found = {route: [send(explorer, route, name).status_code == 429 for _ in range(3)] for route, name in names.items()}
    assert found == {route: [False, False, route not in NOT_LIMITED] for route in MAY}


def test_conversations_of_two_keys_do_not_mix(scripted_engine, start_explorer):
    keys = [hashed("a", "chat", group="a"), hashed("b", "chat", group="b"), hashed("c", "chat", group="a")]
    explorer = start_explorer([scripted_engine.url], keys=keys).wait_ready()

    def turn_as(key: str, messages: list[Any]) -> tuple[str, list[Any]]:
        explorer.http.headers.update(as_key(key))
        name, messages = turn(explorer, messages)
        return name, messages

    first, messages = turn_as("a", FIRST)
    others = [turn_as(key, go_on(messages, "and tomorrow?"))[0] for key in ("b", "c")]
    second, _ = turn_as("a", go_on(messages, "and tomorrow?"))
    found = rows(explorer)
    assert [found[name].parent_id for name in (first, *others, second)] == [None, None, None, first]


def test_keys_behind_one_address_may_choose_the_same_idempotency_key(scripted_engine, start_explorer):
    keys = [hashed("chat", "chat"), hashed("r1", "feedback"), hashed("r2", "feedback")]
    explorer = start_explorer([scripted_engine.url], keys=keys).wait_ready()
    name = send(explorer, "POST /chat", "chat").json()["id"]

    def rate(key: str, reward: float) -> int:
        headers = {**as_key(key), "Idempotency-Key": "1"}
        return explorer.http.post("/feedback", json={"msg_ids": [name], "reward": reward}, headers=headers).status_code

    assert [rate("r1", 0), rate("r2", 1), rate("r1", 1)] == [200, 200, 422]


def test_what_an_operator_decides_bears_the_name_of_the_key(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], keys=[hashed("root", "admin")]).wait_ready()
    explorer.http.headers.update(as_key("root"))
    publish(explorer, 1)
    wait_until(lambda: served(explorer) == "1")
    explorer.http.post("/versions/1/promote").raise_for_status()
    publish(explorer, 2, -2.0)
    explorer.http.post("/rollback", json={"to": 1}).raise_for_status()
    decided = select(decisions.c.version, decisions.c.decided_by).where(decisions.c.decided_by.like("operator%"))
    found = explorer.ledger.fetch(lambda connection: {tuple(row) for row in connection.execute(decided)})
    assert found == {(1, "operator with key root"), (2, "operator with key root")}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_caller_whose_engine_died_does_not_learn_its_address(stream, scripted_engine, explorer):
    lose_core(scripted_engine, "/v1/chat/completions")
    reply = explorer.chat(stream=stream)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_lost")
    assert scripted_engine.url not in reply.text
