"""Attacks on what is learned from: rewards and sampling parameters; and what the status tells of rows left out."""

from __future__ import annotations

import hashlib
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from shared.ledger import queries, transitions
from shared.ledger.tables import experiences
from tests.support.processes import run_here
from trainer_service.trajectories import trajectories_of


def test_a_reward_of_a_million_is_refused_without_any_setting(explorer):
    said = {"msg_ids": [explorer.chat().json()["id"]]}
    assert explorer.http.post("/feedback", json={**said, "reward": 1e6}).status_code == 400
    assert explorer.http.post("/feedback", json={**said, "reward": -100}).status_code == 200


@pytest.mark.parametrize(
    ("rule", "accepted", "refused"),
    [
        ({"metrics": {"stars": 0.5}}, [-200, 200], [-201, 201, 1e300]),
        ({"metrics": {"stars": -0.5}, "accept": [1, 5]}, [-10, 0], [-11, 1]),
        ({"metrics": {"stars": 0.5}, "clip": [-1, 1]}, [1e300], []),
        ({"metrics": {"stars": 0.5}, "accept": None}, [1e6], []),
        ({"metrics": {"other": 0.5}}, [1e6], []),
    ],
    ids=["by default", "its own bounds", "clipped", "without bounds", "no weight"],
)
def test_a_metric_is_no_way_around_the_bounds_of_rewards(scripted_engine, start_explorer, rule, accepted, refused):
    explorer = start_explorer([scripted_engine.url], reward=rule).wait_ready()
    known = explorer.chat().json()["id"]

    def say(stars: float) -> httpx.Response:
        return explorer.http.post("/feedback", json={"msg_ids": [known], "metrics": {"stars": stars}})

    assert [say(stars).status_code for stars in accepted] == [200] * len(accepted)
    for reply in map(say, refused):
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "metrics")


def test_the_temperature_that_is_recorded_is_the_one_that_vllm_used(explorer):
    for asked in (0.00002, 0.009, 0, 0.7):
        assert explorer.chat(temperature=asked).status_code == 200
    with explorer.ledger.read() as connection:
        recorded = connection.execute(select(experiences.c.temperature).order_by(experiences.c.id)).scalars().all()
    assert recorded == [0.01, 0.01, 0, 0.7]


def test_quarantined_rows_and_their_reasons_stand_in_the_status(explorer, capsys):
    explorer.chat()
    with explorer.ledger.write() as connection:
        said = {"state": "DISCARDED", "reason": "quarantined: the update failed with it alone: [bold]no memory"}
        connection.execute(experiences.update().values(said))
    assert explorer.http.get("/status").json()["quarantined"] == {said["reason"]: 1}
    assert run_here(explorer.config, "status") == 0
    assert f"1 {said['reason']}" in capsys.readouterr().out


def test_who_names_somebody_elses_run_reaches_neither_its_rows_nor_its_rewards(scripted_engine, start_explorer):
    def hashed(name: str, role: str, group: str) -> dict[str, str]:
        digest = hashlib.sha256(f"{name:*<16}".encode()).hexdigest()
        return {"sha256": digest, "name": name, "role": role, "group": group}

    keys = [hashed(f"{role}-{group}", role, group) for role in ("chat", "feedback") for group in ("shop", "thief")]
    explorer = start_explorer([scripted_engine.url], keys=keys).wait_ready()
    run = {"task_id": "t", "run_id": "0"}

    def ask(key: str, path: str, body: dict[str, object]) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {key:*<16}"}
        return explorer.http.post(path, json=body, headers=headers).raise_for_status().json()

    for group, reward in (("shop", 1.0), ("thief", -100.0)):
        for _ in range(2):
            ask(f"chat-{group}", "/chat", {"messages": [{"role": "user", "content": "hi"}], "metadata": run})
        ask(f"feedback-{group}", "/feedback", {**run, "reward": reward})
    assert ask("feedback-thief", "/commit", {})["committed"] == 2
    assert ask("feedback-shop", "/commit", {})["committed"] == 2
    with explorer.ledger.write() as connection:
        claimed = [transitions.claim(connection, owner="t", at_least=1, at_most=n, lease_s=60) for n in (1, 9)]
        shop, rest = (queries.load_lease(connection, batch) for batch in claimed)
    assert [row.key_group for row in shop.rows] == ["shop", "shop"]
    found = {t.outcome: len(t.turns) for t in trajectories_of([*shop.rows, *rest.rows])}
    assert found == {1.0: 2, -100.0: 2}
