"""Pinned versions that are rejected or fail, and those that an operator lets engines retry."""

from __future__ import annotations

from functools import partial

from sqlalchemy import func, select, update

from explorer_service.reload import adapter_controller
from explorer_service.reload.blame import Backoff
from shared.adapters import ADAPTER_WEIGHTS
from shared.ledger import transitions
from shared.ledger.connect import database_time
from shared.ledger.tables import engines, load_failures
from shared.versions import version_path
from tests.integration.adapters.test_pins import held, publish_unserved
from tests.support.adapters import engine, limit_hung_loads, publish_and_wait, said, state
from tests.support.scripted_adapters import name_of
from tests.support.servers import RunningExplorer, served, wait_until


def reject(explorer: RunningExplorer, version: int) -> None:
    with explorer.ledger.write() as connection:
        assert transitions.reject_version(connection, version, "it is damaged", by="another engine")


def failures(explorer: RunningExplorer) -> int:
    with explorer.ledger.read() as connection:
        return connection.execute(select(func.count()).select_from(load_failures)).scalar_one()


def test_a_pinned_version_that_is_rejected_while_it_serves_answers_no_more(start, scripted_engine):
    both = [start(), start()]
    publish_and_wait(both[0], 1, 2)
    wait_until(lambda: served(both[1]) == "2")
    assert [said(explorer.chat(model="agent@1")) for explorer in both] == ["v000001"] * 2
    reject(both[0], 1)
    wait_until(lambda: ["is REJECTED" in explorer.chat(model="agent@1").text for explorer in both] == [True] * 2)
    wait_until(lambda: held(scripted_engine) == ["agent@2"])


def test_a_pinned_version_that_is_rejected_while_it_is_loaded_does_not_serve(explorer, scripted_engine):
    publish_and_wait(explorer, 1, 2)
    wait_until(lambda: held(scripted_engine) == ["agent@2"])
    loaded = f"loaded {name_of(explorer, 1)}"
    scripted_engine.script.say = lambda word: reject(explorer, 1) if word == loaded else None
    assert explorer.chat(model="agent@1").status_code == 404
    wait_until(lambda: held(scripted_engine) == ["agent@2"])


def test_a_skipped_version_that_an_engine_has_proven_is_not_failed_for_later_timeouts(start, scripted_engine):
    explorer, script = start(unpin_after_s=0.2), scripted_engine.script
    limit_hung_loads(explorer, script)
    publish_unserved(explorer, scripted_engine)
    assert said(explorer.chat(model="agent@1")) == "v000001"
    wait_until(lambda: held(scripted_engine) == ["agent@2"])
    script.hung = {"/v1/load_lora_adapter"}
    wait_until(lambda: explorer.chat(model="agent@1").status_code == 404 and failures(explorer) >= 2)
    assert state(explorer, 1) == "SKIPPED"


def test_a_request_for_a_version_that_once_failed_to_load_has_it_loaded_again(start, scripted_engine):
    explorer, refused = start(unpin_after_s=0.2), scripted_engine.script.refused
    publish_and_wait(explorer, 1, 2)
    wait_until(lambda: held(scripted_engine) == ["agent@2"])
    refused.add("/v1/load_lora_adapter")
    assert explorer.chat(model="agent@1").status_code == 404
    refused.clear()
    wait_until(lambda: not explorer.deps.pool.pinned and not engine(explorer).refused)
    assert said(explorer.chat(model="agent@1")) == "v000001"


def test_a_failed_version_that_an_operator_lets_engines_retry_is_loaded_at_once(start, scripted_engine):
    explorer, script = start(retry_s=1.0), scripted_engine.script
    limit_hung_loads(explorer, script)
    publish_unserved(explorer, scripted_engine)
    script.hung = {"/v1/load_lora_adapter"}
    assert explorer.chat(model="agent@1").status_code == 404
    wait_until(lambda: state(explorer, 1) == "FAILED")
    script.hung = set()
    wait_until(lambda: not engine(explorer).refused)
    with explorer.ledger.write() as connection:
        assert transitions.retry_version(connection, 1, by="operator")
    assert said(explorer.chat(model="agent@1")) == "v000001"


def test_who_waits_at_another_explorer_for_a_version_that_is_rejected_gets_a_404(start, scripted_engine):
    owner, follower = start(unpin_after_s=2.0), start(unpin_after_s=2.0)
    publish_unserved(owner, scripted_engine)
    wait_until(lambda: served(follower) == "2")
    scripted_engine.script.without_effect.add(name_of(owner, 1))
    reply = follower.chat(model="agent@1")
    assert (reply.status_code, state(owner, 1)) == (404, "REJECTED"), reply.text


def test_a_pinned_version_that_engines_have_proven_is_not_rejected_for_a_damaged_file(start, scripted_engine):
    explorer = start(retry_s=0.5)
    publish_and_wait(explorer, 1, 2)
    wait_until(lambda: held(scripted_engine) == ["agent@2"])
    weights = explorer.config.root / version_path(1) / ADAPTER_WEIGHTS
    whole = weights.read_bytes()
    weights.write_bytes(bytes([*whole[:-1], whole[-1] ^ 1]))
    refused = explorer.chat(model="agent@1")
    assert (refused.status_code, "does not match its sha256" in refused.text) == (404, True)
    assert state(explorer, 1) == "RETIRED"
    weights.write_bytes(whole)
    wait_until(lambda: explorer.chat(model="agent@1").status_code == 200)


def test_who_owns_the_engine_no_more_refuses_no_version_that_its_new_owner_loads(start, scripted_engine):
    both, url = [start(retry_s=60.0, unpin_after_s=0.5) for _ in range(2)], scripted_engine.url
    before, after = sorted(both, key=lambda explorer: not explorer.deps.leases.holds(url))
    publish_and_wait(before, 1, 2)
    wait_until(lambda: served(after) == "2" and held(scripted_engine) == ["agent@2"])
    scripted_engine.script.refused.add("/v1/load_lora_adapter")
    assert before.chat(model="agent@1").status_code == 404
    wait_until(lambda: not before.deps.pool.pinned)
    scripted_engine.script.refused.clear()
    with before.ledger.write() as connection:
        until = database_time(connection) + 60.0  # its heartbeats renew it
        connection.execute(update(engines).values(owner=after.deps.leases.explorer, owner_until=until))
    wait_until(lambda: after.deps.leases.holds(url) and not before.deps.leases.believes_to_own(url))
    wait_until(lambda: not engine(before).refused)  # its controller has read that another explorer owns the engine
    assert said(before.chat(model="agent@1")) == "v000001"


def test_a_pinned_version_that_was_loaded_again_has_after_its_next_failure_the_first_wait(
    start, scripted_engine, monkeypatch
):
    now = 0.0
    monkeypatch.setattr(adapter_controller, "Backoff", partial(Backoff, clock=lambda: now))
    explorer, refused = start(retry_s=60.0, unpin_after_s=0.3), scripted_engine.script.refused
    publish_and_wait(explorer, 1, 2)
    for _ in range(2):
        wait_until(lambda: held(scripted_engine) == ["agent@2"])
        refused.add("/v1/load_lora_adapter")
        wait_until(lambda: explorer.chat(model="agent@1").status_code == 404)
        refused.clear()
        now += 61.0
        wait_until(lambda: explorer.chat(model="agent@1").status_code == 200)
