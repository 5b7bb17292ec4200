"""What goes wrong in a take-up, with two explorers on two engines and streams in flight: all ends in order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from sqlalchemy import func, select

from explorer_service.engines import admin
from shared.ledger.tables import load_failures
from tests.support import take_up_faults
from tests.support.failing_ledger import failing_statements
from tests.support.forms import FULL
from tests.support.house import House, Streams
from tests.support.reloads import give_up_hung_loads
from tests.support.script import Script
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, make_config, wait_until

SETTINGS = {"poll_interval_s": 0.02, "drain_s": 1.0, "retry_s": 0.05}
AT_MOST = None if FULL else 2  # statements of a take-up that fail


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One house for all tests. Its ledger is SQLite: nothing here depends on the database."""
    root, engines = tmp_path_factory.mktemp("house"), [ScriptedEngine(), ScriptedEngine()]
    urls = [engine.url for engine in engines]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admin, "HEALTH_TIMEOUT_S", 60.0)  # as in start_explorer
        give_up_hung_loads(patch, *engines)
        configs = [make_config(root, urls, reload=SETTINGS, engine_wait_s=60.0) for _ in range(2)]
        house = House([RunningExplorer(config).wait_ready() for config in configs], engines)
        yield house.begin()
        for explorer in house.explorers:
            explorer.stop()
    for engine in engines:
        engine.stop()


@pytest.fixture
def house(kept: House) -> Iterator[House]:
    """Without faults, and what `House.good` returns serves."""
    kept.all_serve(kept.good())
    yield kept
    kept.mend()


FAULTS = {
    "load refused": ("failed_loads", "REJECTED"),
    "wrong probe": ("wrong_probe_for", "REJECTED"),
    "engine dies in the load": ("deadly_loads", "FAILED"),
    "load hangs": ("hung_loads", "FAILED"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_version_that_no_engine_takes_up_is_given_up_and_the_last_good_one_serves(house, fault):
    (name, state), good, version = FAULTS[fault], house.good(), house.newest + 1
    for engine in house.engines:
        getattr(engine.script, name).add(f"v{version:06d}")
    with Streams(house) as chats:
        house.publish(version)
        wait_until(lambda: house.state(version) == state, 120)
    house.all_serve(good)
    assert house.row(version).reason and house.row(version).served_at is None
    chats.check_labels()
    if fault in ("load refused", "load hangs"):
        assert len(chats.whole) == 8, chats.ended
    if fault == "wrong probe":
        assert set(chats.ended.values()) == {"weights_unproven"}
    loads = house.loads(version)
    assert loads <= 2
    house.publish(version + 1)
    house.all_serve(version + 1)
    assert house.loads(version) == loads


def refuse_probe(script: Script, version: str, dying: list[Script] | None) -> None:
    """dying: the engine that dies of it, once one is asked; None: it stays healthy."""
    is_asked = script.loaded == version
    if is_asked and dying == []:
        dying.append(script)
    is_asked = is_asked and (dying is None or script is dying[0])
    script.refused = {"/v1/completions"} if is_asked else set()
    script.healthy = not (is_asked and dying)


@pytest.mark.parametrize("dies", [False, True])
def test_a_probe_that_a_healthy_engine_refuses_is_one_that_failed_and_else_the_engine_has_died(house, dies):
    good, version, dying = house.good(), house.newest + 1, [] if dies else None
    for engine in house.engines:
        engine.script.on_call["/v1/completions"] = partial(refuse_probe, engine.script, f"v{version:06d}", dying)
    with Streams(house) as chats:
        house.publish(version)
        if dies:
            wait_until(lambda: load_failures_of(house, version) > 0)
            house.mend()
    house.all_serve(version if dies else good)
    assert house.state(version) == ("SERVING" if dies else "REJECTED")
    assert dies or (house.loads(version) == 1 and "is refused" in house.row(version).reason)
    assert set(chats.ended.values()) == {"weights_unproven"}
    chats.check_labels()


def load_failures_of(house: House, version: int) -> int:
    with house.ledger.read() as connection:
        count = select(func.count()).select_from(load_failures).where(load_failures.c.version == version)
        return connection.execute(count).scalar_one()


@pytest.mark.parametrize("path", take_up_faults.CALLS)
def test_an_engine_that_is_killed_once_in_a_take_up_comes_back_and_takes_it_up(house, path):
    take_up_faults.kill_engine(house, path)


def test_a_fault_of_a_folder_reaches_neither_an_engine_nor_a_stream(house):
    take_up_faults.give_up_folders(house, house.good())


def test_a_folder_that_shows_late_is_taken_up_then(house, tmp_path):
    take_up_faults.wait_for_folder(house, house.good(), tmp_path / "late")


def test_engines_whose_disk_is_full_serve_on_and_stage_the_version_when_there_is_room(house, monkeypatch):
    take_up_faults.fill_staging_disk(house, house.good(), monkeypatch)


@pytest.mark.parametrize("is_good", [True, False], ids=["good", "wrong probe"])
def test_the_ledger_fails_at_any_statement_and_all_ends_in_order(house, is_good):
    good = house.good()
    with failing_statements() as ledger:
        take_up_faults.take_up(house, good, is_good)
        statements = list(ledger.met)
        for statement in statements[:: 1 if AT_MOST is None else len(statements) // AT_MOST]:
            ledger.arm(1, statement)
            take_up_faults.take_up(house, good, is_good)
            assert ledger.refused == statement
    assert len(statements) >= 8


def test_one_engine_at_a_time_reloads_for_all_explorers(house):
    for engine in house.engines:
        engine.script.reload_s, engine.script.reloads = 0.3, []
    house.publish(version := house.newest + 1)
    house.all_serve(version)
    one, other = sorted(reload for engine in house.engines for reload in engine.script.reloads)
    assert one[1] <= other[0], "both reloaded at once"
