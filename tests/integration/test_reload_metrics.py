"""The metrics of reloads: how long each took, by stage, and why others failed."""

from __future__ import annotations

import re

import pytest
from sqlalchemy import select

from explorer_service.reload.controller import EngineController
from shared.ledger import transitions
from shared.ledger.queries import VersionRow, ledger_status, progress
from shared.ledger.tables import engines, versions
from tests.support.forms import one_database
from tests.support.script import Script
from tests.support.servers import RunningExplorer, publish, served, wait_until, write_scripted_version

DURATIONS = ("pause", "gap", "stage", "proof")


def value(explorer: RunningExplorer, name: str) -> float:
    """Of a metric with its labels; 0 where it has none yet."""
    found = re.search(rf"^flywheel_reload_{re.escape(name)} (\S+)$", explorer.http.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def state_of(explorer: RunningExplorer, version: int) -> str:
    with explorer.ledger.read() as connection:
        return str(connection.execute(select(versions.c.state).where(versions.c.version == version)).scalar_one())


@one_database
def test_a_reload_is_counted_and_timed_once_in_each_of_its_stages(explorer, scripted_engine):
    scripted_engine.script.reload_s = 0.2
    before = {name: value(explorer, f"{name}_seconds_count") for name in DURATIONS}
    publish(explorer, 1)
    wait_until(lambda: served(explorer) == "1")
    wait_until(lambda: value(explorer, 'versions_total{result="served"}') == 1)
    assert {name: value(explorer, f"{name}_seconds_count") - before[name] for name in DURATIONS} == dict.fromkeys(
        DURATIONS, 1.0
    )
    took = {name: value(explorer, f"{name}_seconds_sum") for name in DURATIONS}
    assert took["gap"] >= took["pause"] >= 0.2
    wait_until(lambda: value(explorer, "lag_versions") == 0)  # of a query before the other numbers


def test_versions_that_no_engine_has_served_count_alike_in_the_metric_and_in_the_status(ledger):
    with ledger.write() as connection:
        for version in range(3):
            transitions.publish(connection, version=version, parent=max(0, version - 1), kind="full", step=version)
    assert ledger.fetch(progress).lag == ledger.fetch(ledger_status)["lag_versions"] == 2


def damage(explorer: RunningExplorer, _: Script) -> None:
    weights = explorer.config.root / "versions/v000002/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"X")


def slip_in_a_pickle(explorer: RunningExplorer, _: Script) -> None:
    (explorer.config.root / "versions/v000002/weights.bin").write_bytes(b"x")


def fail_load(_: RunningExplorer, script: Script) -> None:
    script.failed_loads = {"v000002"}


def disprove(_: RunningExplorer, script: Script) -> None:
    script.wrong_probe_for = {"v000002"}


FAULTS = [(slip_in_a_pickle, "unsound"), (damage, "stage"), (fail_load, "load"), (disprove, "probe")]


@one_database
@pytest.mark.parametrize(("fault", "reason"), FAULTS)
def test_a_version_that_is_not_taken_up_is_counted_by_the_reason(fault, reason, explorer, scripted_engine):
    publish(explorer, 1)
    wait_until(lambda: served(explorer) == "1")
    write_scripted_version(explorer.config.root, 2, -2.0)
    fault(explorer, scripted_engine.script)
    with explorer.ledger.write() as connection:
        transitions.publish(connection, version=2, parent=1, kind="full", step=2)
    wait_until(lambda: state_of(explorer, 2) == "REJECTED")
    wait_until(lambda: value(explorer, f'failures_total{{reason="{reason}"}}') >= 1)
    others = {"stage", "load", "timeout", "probe", "death", "refused", "unsound"} - {reason}
    assert not any(value(explorer, f'failures_total{{reason="{other}"}}') for other in others)
    wait_until(lambda: value(explorer, 'versions_total{result="rejected"}') == 1)  # counted after it is stored


@one_database
def test_an_engine_that_goes_on_serving_what_it_has_is_counted_as_no_take_up(explorer, scripted_engine):
    for version in (0, 1):
        publish(explorer, version, -1.0 - version)
        wait_until(lambda version=version: served(explorer) == str(version))
    before = value(explorer, 'versions_total{result="served"}')
    scripted_engine.script.refused.add("/flywheel/stage")
    publish(explorer, 2, -3.0)
    wait_until(lambda: explorer.http.get("/status").json()["engines"][0]["state"] == "degraded")
    wait_until(lambda: value(explorer, 'failures_total{reason="stage"}') >= 1)
    assert value(explorer, 'versions_total{result="served"}') == before


@one_database
def test_an_engine_that_comes_back_with_what_it_served_is_counted_as_no_take_up(explorer, scripted_engine):
    publish(explorer, 1)
    wait_until(lambda: served(explorer) == "1")
    wait_until(lambda: value(explorer, 'versions_total{result="served"}') == 1)
    engine = explorer.deps.pool.engines[0]
    scripted_engine.script.healthy = False
    wait_until(lambda: engine.state == "unavailable")
    scripted_engine.script.healthy = True
    wait_until(lambda: engine.is_open and served(explorer) == "1")
    assert len(scripted_engine.script.reloads) == 1
    assert value(explorer, 'versions_total{result="served"}') == 1


@one_database
def test_an_engine_that_cannot_go_back_is_announced_once(start_explorer, scripted_engine, monkeypatch):
    explorer = start_explorer([scripted_engine.url], reload={"poll_interval_s": 0.02, "retry_s": 600.0}).wait_ready()
    for version in range(3):
        publish(explorer, version)
        wait_until(lambda version=version: served(explorer) == str(version))
    scripted_engine.script.failed_loads = {"v000001"}
    assert explorer.http.post("/versions/1/promote").status_code == 200
    engine = explorer.deps.pool.engines[0]
    wait_until(lambda: engine.state == "degraded" and engine.is_open)

    def stands() -> tuple[int, float]:
        generation = explorer.ledger.fetch(lambda c: c.execute(select(engines.c.generation)).scalar_one())
        return generation, value(explorer, 'versions_total{result="served"}')

    before, rounds, bring_in = stands(), [], EngineController._bring_in

    async def watched(self: EngineController, wanted: VersionRow) -> None:
        await bring_in(self, wanted)
        rounds.append(wanted.version)

    monkeypatch.setattr(EngineController, "_bring_in", watched)
    wait_until(lambda: len(rounds) > 2)
    assert stands() == before
