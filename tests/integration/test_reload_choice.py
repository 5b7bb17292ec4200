"""Which version an engine is given, and which it serves until then."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from explorer_service.engines.admin import EngineAdmin
from explorer_service.reload import controller
from explorer_service.reload.judge import VersionJudge
from shared.errors import VersionError, VersionMissing
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from tests.support.postgres import sqlite_alone
from tests.support.reloads import SETTINGS, announced, reject, shown, states, take_the_turn
from tests.support.servers import RunningExplorer, publish, served, wait_until, write_scripted_version

pytestmark = pytest.mark.usefixtures("patient_health")
database_url = sqlite_alone  # nothing here depends on the database


def test_an_engine_is_not_opened_as_version_0_when_every_version_was_given_up(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    publish(explorer, 0)
    publish(explorer, 1, -2.0)
    wait_until(lambda: served(explorer) == "1")
    reject(explorer, 1, 0)
    wait_until(lambda: shown(explorer)["state"] == "checking")
    assert announced(explorer)[0] == "checking"
    explorer.stop()
    again = start_explorer([scripted_engine.url], reload=SETTINGS, engine_wait_s=1.0)
    wait_until(lambda: "none may serve" in str(shown(again)["reason"]))
    reply = again.chat()
    assert reply.status_code == 503 and "X-Flywheel-Version" not in reply.headers
    again.deps.pool._wait_s = 30.0
    publish(again, 2, -3.0)
    wait_until(lambda: shown(again)["state"] == "serving")
    assert served(again) == "2"


def test_an_engine_serves_what_it_was_started_with_while_a_trainer_has_only_reserved_a_number(
    scripted_engine, start_explorer
):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    with explorer.ledger.write() as connection:
        assert transitions.reserve_version(connection, writer="t") == 0
    explorer.stop()
    assert served(start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()) == "0"


def test_the_first_version_is_taken_up_although_the_poller_has_not_seen_it(scripted_engine, start_explorer, caplog):
    seldom = SETTINGS | {"poll_interval_s": 3600.0}
    explorer = start_explorer([scripted_engine.url], reload=seldom).wait_ready()
    publish(explorer, 0)
    wait_until(lambda: "reload v000000" in scripted_engine.script.calls)
    assert served(explorer) == "0"
    assert "no version may serve" not in caplog.text


@pytest.fixture
def version_2(scripted_engine, second_engine, start_explorer) -> Iterator[Ledger]:
    """Version 2, published while no explorer runs. Two engines hold version 1, which has served; the ledger."""
    first = start_explorer([scripted_engine.url, second_engine.url], reload=SETTINGS).wait_ready()
    for version in (0, 1):
        publish(first, version, -1.0 - version)
        wait_until(lambda: [engine.version for engine in first.deps.pool.serving] == [version] * 2)  # noqa: B023
    first.stop()
    write_scripted_version(first.config.root, 2, -3.0)
    ledger = Ledger.open(first.config.ledger_url)
    with ledger.write() as connection:
        transitions.publish(connection, version=2, parent=1, kind="full", step=2)
    yield ledger
    ledger.close()


def test_an_engine_that_holds_the_last_good_version_serves_it_until_it_may_take_up_the_newest(
    version_2, scripted_engine, start_explorer, monkeypatch
):
    monkeypatch.setattr("shared.ledger.transitions.leases.LEASE_S", 3600.0)
    take_the_turn(version_2, "ghost", 1800.0)
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS)
    assert served(explorer) == "1"
    take_the_turn(version_2, None)
    wait_until(lambda: served(explorer) == "2")


def test_of_two_engines_that_start_anew_with_a_newer_version_one_serves_at_any_time(
    version_2, scripted_engine, second_engine, start_explorer
):
    scripts = [scripted_engine.script, second_engine.script]
    for script in scripts:
        script.hung_loads = {"v000002"}
    explorer = start_explorer([scripted_engine.url, second_engine.url], reload=SETTINGS)
    wait_until(lambda: any("reload v000002" in script.calls for script in scripts))
    assert served(explorer) == "1"
    for script in scripts:
        script.hung_loads = set()
    wait_until(lambda: [engine.version for engine in explorer.deps.pool.serving] == [2, 2])


@pytest.mark.usefixtures("lasting_leases")
def test_a_proven_version_is_not_rejected_for_a_machine_that_does_not_see_its_folder(
    scripted_engine, second_engine, start_explorer, monkeypatch
):
    healthy = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    publish(healthy, 0)
    wait_until(lambda: served(healthy) == "0")
    find, blind, proven = VersionJudge._find, [True], threading.Event()

    def find_or_not(self, row, *rest):
        if blind and self._appear_s == 0.5 and row.version == 1:
            assert proven.wait(240)  # a version that no engine has proven is rejected after so short a time
            raise VersionMissing("v000001: cannot be read (Stale file handle)")
        return find(self, row, *rest)

    monkeypatch.setattr(VersionJudge, "_find", find_or_not)
    sick = start_explorer([second_engine.url], reload=SETTINGS | {"appear_s": 0.5}).wait_ready()
    wait_until(lambda: served(sick) == "0")
    publish(healthy, 1, -2.0)
    wait_until(lambda: served(healthy) == "1")
    proven.set()
    wait_until(lambda: shown(sick)["state"] == "degraded")
    assert "Stale file handle" in str(shown(sick)["reason"])
    assert (served(sick), states(sick)[1]) == ("0", "SERVING")
    blind.clear()
    wait_until(lambda: served(sick) == "1" and shown(sick)["state"] == "serving")


def test_a_withdrawn_version_does_not_serve_on_for_the_interval_between_two_reloads(scripted_engine, start_explorer):
    settings = SETTINGS | {"min_interval_s": 600.0}
    explorer = start_explorer([scripted_engine.url], reload=settings).wait_ready()
    scripted_engine.start_on(write_scripted_version(explorer.config.root, 0, -1.0))
    with explorer.ledger.write() as connection:  # it holds version 0 already, and is not reloaded for it
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
    wait_until(lambda: states(explorer)[0] == "SERVING")
    publish(explorer, 1, -2.0)
    wait_until(lambda: served(explorer) == "1")
    reject(explorer, 1)
    wait_until(lambda: served(explorer) == "0")


def test_a_version_that_is_rejected_while_a_newer_one_waits_for_the_interval_is_replaced_at_once(
    scripted_engine, start_explorer
):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS | {"min_interval_s": 600.0}).wait_ready()
    for version in (1, 2):
        publish(explorer, version, -1.0 - version)
        wait_until(lambda: served(explorer) == "1")
    reject(explorer, 1)
    wait_until(lambda: served(explorer) == "2")


def test_a_version_that_is_rejected_while_a_newer_one_is_missing_does_not_serve_on(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    for version in (0, 1):
        publish(explorer, version, -1.0 - version)
        wait_until(lambda version=version: served(explorer) == str(version))
    with explorer.ledger.write() as connection:
        transitions.publish(connection, version=2, parent=1, kind="full", step=2)
    reject(explorer, 1)
    wait_until(lambda: served(explorer) == "0")


def test_versions_that_fail_one_after_the_other_pause_an_engine_no_more_often_than_good_ones(
    scripted_engine, start_explorer, monkeypatch
):
    bring_in, seen, later_s = controller.EngineController._bring_in, [], [0.0]

    async def see(self, newest):
        await bring_in(self, newest)
        seen.append(newest.version)

    monkeypatch.setattr(controller.EngineController, "_bring_in", see)
    monkeypatch.setattr(controller, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later_s[0]))
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS | {"min_interval_s": 600.0}).wait_ready()
    script = scripted_engine.script
    publish(explorer, 0)
    wait_until(lambda: script.loaded == "v000000" and shown(explorer)["state"] == "serving")
    script.failed_loads = {"v000001", "v000002"}
    later_s[0] += 600.0
    publish(explorer, 1, -2.0)
    wait_until(lambda: states(explorer)[1] == "REJECTED" and shown(explorer)["state"] == "serving")
    publish(explorer, 2, -3.0)
    wait_until(lambda: 2 in seen)
    publish(explorer, 3, -4.0)
    wait_until(lambda: 3 in seen)
    later_s[0] += 600.0
    wait_until(lambda: served(explorer) == "3")
    assert "reload v000002" not in script.calls


def test_what_goes_back_in_is_proven_by_its_own_tolerance(scripted_engine, start_explorer):
    """Version 1 is of a trainer in bfloat16, which may be further from the engine than version 2's in float32."""
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    script = scripted_engine.script
    publish(explorer, 0)
    wait_until(lambda: states(explorer)[0] == "SERVING")
    script.noise = 0.05
    publish(explorer, 1, -2.0, arithmetic="bfloat16")
    wait_until(lambda: served(explorer) == "1")
    script.failed_loads, calls = {"v000002"}, len(script.calls)
    publish(explorer, 2, -3.0)
    wait_until(lambda: states(explorer)[2] == "REJECTED" and shown(explorer)["state"] == "serving")
    loads = [call for call in script.calls[calls:] if call.startswith("reload")]
    assert loads == ["reload v000002", "reload v000001"] and served(explorer) == "1"


def test_damage_to_what_serves_holds_up_no_newer_version(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    for version in range(2):
        publish(explorer, version, -1.0 - version)
        wait_until(lambda version=version: served(explorer) == str(version))
    explorer.stop()
    file = explorer.config.root / "versions/v000001/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    again = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    assert served(again) == "1", "as the engine has it in its memory"
    publish(again, 2, -3.0)
    wait_until(lambda: served(again) == "2")


def test_a_proven_version_is_not_rejected_for_what_one_machine_stages_of_it(
    scripted_engine, start_explorer, monkeypatch
):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    for version in range(2):
        publish(explorer, version, -1.0 - version)
        wait_until(lambda version=version: served(explorer) == str(version))
    explorer.stop()
    scripted_engine.die()
    publish(explorer, 2, -3.0)

    async def stage(_self, version, *_more):
        if version == 1:
            raise VersionError("v000001: 'model.safetensors' does not match its sha256")

    monkeypatch.setattr(EngineAdmin, "stage", stage)
    again = start_explorer([scripted_engine.url], reload=SETTINGS)
    wait_until(lambda: states(again)[2] == "SERVING")
    assert states(again)[1] == "RETIRED"


@pytest.fixture
def degraded(scripted_engine, second_engine, start_explorer) -> RunningExplorer:
    """Its second engine serves version 2, which the first one could not stage, and does not try again soon."""
    urls, retry = [scripted_engine.url, second_engine.url], {"retry_s": 600.0, "answer_timeout_s": 5.0}
    explorer = start_explorer(urls, reload=SETTINGS | retry)
    for version in (0, 1):
        publish(explorer, version, -1.0 - version)
        wait_until(lambda: [engine.version for engine in explorer.deps.pool.serving] == [version] * 2)  # noqa: B023
    scripted_engine.script.refused.add("/flywheel/stage")
    publish(explorer, 2, -3.0)
    wait_until(lambda: [engine.version for engine in explorer.deps.pool.engines] == [1, 2])
    wait_until(lambda: shown(explorer)["state"] == "degraded")
    scripted_engine.script.refused.clear()
    return explorer


def test_an_engine_that_is_restarted_on_the_version_that_it_failed_to_load_serves_it(degraded, scripted_engine):
    calls = len(scripted_engine.script.calls)
    scripted_engine.script.starts_on = degraded.config.root / "versions/v000002"
    scripted_engine.die()
    wait_until(lambda: (shown(degraded)["state"], shown(degraded)["version"]) == ("serving", 2))
    assert "reload v000001" not in scripted_engine.script.calls[calls:]


@pytest.mark.parametrize("ends", ["late", "dead"])
def test_an_engine_that_is_restarted_on_a_version_of_which_it_scores_no_probe_gets_the_last_good_one(
    degraded, scripted_engine, ends
):
    script, calls = scripted_engine.script, len(scripted_engine.script.calls)

    def score() -> None:
        if script.loaded == "v000002":
            time.sleep(6.0) if ends == "late" else scripted_engine.die()

    script.on_call["/v1/completions"] = score
    script.starts_on = degraded.config.root / "versions/v000002"
    scripted_engine.die()
    wait_until(lambda: "reload v000001" in script.calls[calls:])
    wait_until(lambda: (shown(degraded)["state"], shown(degraded)["version"]) == ("degraded", 1))
