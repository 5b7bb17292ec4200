"""PUT /traffic and POST /versions/N/promote: who may, what they answer, and which version then answers chats."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import select

from shared.experience import VersionState as S
from shared.ledger.queries import find_versions
from shared.ledger.tables import decisions
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, keys_of_roles, publish, served, wait_until


def entered_service(explorer: RunningExplorer) -> list[int]:
    """The versions that came into service, in order."""
    entered = select(decisions.c.version).where(decisions.c.to_state == S.SERVING, decisions.c.from_state != S.SERVING)
    return explorer.ledger.fetch(lambda c: list(c.execute(entered.order_by(decisions.c.id)).scalars()))


def version_state(explorer: RunningExplorer, version: int) -> str:
    return explorer.ledger.fetch(lambda c: find_versions(c, [version]))[version].state


def test_a_promoted_version_serves_and_later_ones_wait_until_an_operator_wants_them(explorer, scripted_engine):
    for version in (1, 2):
        publish(explorer, version, -version)
        wait_until(lambda version=version: served(explorer) == str(version))
    answer = explorer.http.post("/versions/1/promote")
    assert (answer.status_code, answer.json()) == (200, {"status": "success", "traffic": {"1": 1.0}})
    wait_until(lambda: served(explorer) == "1")
    assert scripted_engine.script.loaded == "v000001"
    publish(explorer, 3, -3.0)
    publish(explorer, 4, -4.0)
    assert explorer.http.get("/status").json()["versions"]["shares"] == {"1": 1.0}
    assert explorer.http.put("/traffic", json={"weights": {"3": 2}}).json()["traffic"] == {"3": 1.0}
    wait_until(lambda: served(explorer) == "3")
    answer = explorer.http.put("/traffic", json={"weights": None, "why": "it is good"})
    assert answer.json() == {"status": "success", "traffic": {}, "ignored": ["why"]}
    wait_until(lambda: served(explorer) == "4")
    assert explorer.http.get("/status").json()["versions"]["shares"] == {}
    assert entered_service(explorer) == [1, 2, 1, 3, 4]


def test_a_promoted_version_that_fails_its_proof_is_rejected_and_the_one_before_goes_on(explorer, scripted_engine):
    publish(explorer, 1, -1.0)
    wait_until(lambda: served(explorer) == "1")
    explorer.http.post("/versions/1/promote")
    publish(explorer, 2, -2.0)
    scripted_engine.script.wrong_probe_for.add("v000003")
    publish(explorer, 3, -3.0)
    assert explorer.http.post("/versions/3/promote").status_code == 200
    wait_until(lambda: version_state(explorer, 3) == S.REJECTED)
    wait_until(lambda: served(explorer) == "1")
    publish(explorer, 4, -4.0)
    explorer.http.post("/versions/4/promote")
    wait_until(lambda: served(explorer) == "4")
    assert entered_service(explorer) == [1, 4]
    assert version_state(explorer, 2) == S.SKIPPED


def test_only_an_operator_may_and_a_refusal_says_why(
    scripted_engine: ScriptedEngine, start_explorer: Callable[..., RunningExplorer], monkeypatch: pytest.MonkeyPatch
):
    explorer = start_explorer([scripted_engine.url], keys=keys_of_roles(monkeypatch)).wait_ready()

    def ask(method: str, path: str, body: object = None, role: str = "admin") -> tuple[int, str]:
        headers = {"Authorization": f"Bearer secret-key-of-{role}"}
        answer = explorer.http.request(method, path, json=body, headers=headers)
        return answer.status_code, answer.text

    for role in ("chat", "feedback"):
        assert ask("PUT", "/traffic", {"weights": {"0": 1}}, role)[0] == 403
        assert ask("POST", "/versions/0/promote", {}, role)[0] == 403
    for version in ("7", str(2**31), "9" * 19):
        status, text = ask("POST", f"/versions/{version}/promote")
        assert status == 409 and "no version" in text.replace("does not exist", "no version") and "cannot_serve" in text
    for version in ("x", "-1", "1.5", "9" * 20, "%D9%A3"):
        assert ask("POST", f"/versions/{version}/promote")[0] == 400, version
    status, text = ask("PUT", "/traffic", {"weights": {"0": 1, "1": 1}})
    assert status == 409 and "model.kind: lora" in text
    for weights in ({"0": -1}, {"0": 0}, {"-1": 1}):
        assert ask("PUT", "/traffic", {"weights": weights})[0] == 409, weights
    for wrong in (
        {},
        [],
        None,
        {"weights": 1},
        {"weights": {}},
        {"weights": {"a": 1}},
        {"weights": {"0": "1"}},
        {"weights": {"0": None}},
    ):
        assert ask("PUT", "/traffic", wrong)[0] == 400, wrong
