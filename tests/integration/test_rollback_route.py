"""POST /rollback: who may, what it answers, and which version then answers chats."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shared.ledger import transitions
from shared.ledger.queries import list_versions
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, keys_of_roles, publish, served, wait_until


def test_engines_return_to_it_within_a_second_and_take_up_what_comes_after(explorer, scripted_engine):
    for version in (1, 2):
        publish(explorer, version, -version)
        wait_until(lambda version=version: served(explorer) == str(version))
    answer = explorer.http.post("/rollback", json={"to": 1, "why": "it is rude"})
    assert (answer.status_code, answer.json()) == (
        200,
        {"status": "success", "to": 1, "rejected": [2], "trainers": {}, "held": {}, "rows": 0, "ignored": ["why"]}
        | {"traffic": {"1": 1.0}},
    )
    wait_until(lambda: served(explorer) == "1")
    assert scripted_engine.script.loaded == "v000001"
    publish(explorer, 3, -3.0)
    wait_until(lambda: served(explorer) == "3")


def test_only_an_operator_may_and_a_refusal_says_why(
    scripted_engine: ScriptedEngine, start_explorer: Callable[..., RunningExplorer], monkeypatch: pytest.MonkeyPatch
):
    explorer = start_explorer([scripted_engine.url], keys=keys_of_roles(monkeypatch)).wait_ready()

    def ask(body: object, role: str = "admin") -> tuple[int, str]:
        headers = {"Authorization": f"Bearer secret-key-of-{role}"}
        answer = explorer.http.post("/rollback", json=body, headers=headers)
        return answer.status_code, answer.text

    for role in ("chat", "feedback"):
        assert ask({"to": 0}, role)[0] == 403
    status, text = ask({"to": 7})
    assert status == 409 and "there is no version 7" in text and "cannot_roll_back" in text
    for unknown in (-1, 2**31, 2**70):
        assert ask({"to": unknown})[0] == 409
    for wrong in (
        {},
        {"to": 0, "again": 1},
        {"to": 1.5},
        {"to": "1"},
        {"to": True},
        [],
        None,
    ):
        assert ask(wrong)[0] == 400, wrong
    with explorer.ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
    assert ask({"to": 0})[0] == 200
    with explorer.ledger.read() as connection:
        assert [(row.version, row.state) for row in list_versions(connection)] == [(0, "PUBLISHED")]
