"""Reload: versions come into service only when the engine proves them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import select

from explorer_service.reload.poller import VersionPoller
from shared.errors import LedgerError
from shared.ledger import transitions
from shared.ledger.queries import VersionRow, list_versions
from shared.ledger.tables import experiences
from tests.support.failing_ledger import FailingLedger, failing_statements
from tests.support.forms import FULL, one_database
from tests.support.processes import run_here
from tests.support.reloads import versions_of_a_stream_across
from tests.support.script import Script
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, publish, served, wait_until, write_scripted_version

pytestmark = [pytest.mark.usefixtures("patient_health"), one_database]


def version_states(explorer: RunningExplorer) -> dict[int, str]:
    with explorer.ledger.read() as connection:
        return {row.version: row.state for row in list_versions(connection)}


def test_a_published_version_comes_into_service_without_a_restart(explorer, scripted_engine):
    publish(explorer, 1, -1.5)
    wait_until(lambda: served(explorer) == "1")
    calls = scripted_engine.script.calls
    start = calls.index("/pause")
    assert calls[start : start + 4] == ["/pause", "reload v000001", "/reset_prefix_cache", "/resume"]
    assert version_states(explorer) == {1: "SERVING"}
    assert explorer.chat(model="agent@1").status_code == 200


def test_a_version_whose_probe_the_engine_does_not_reproduce_is_rejected_and_the_last_good_one_goes_back(
    explorer, scripted_engine
):
    publish(explorer, 1, -1.5)
    wait_until(lambda: served(explorer) == "1")
    scripted_engine.script.wrong_probe_for = {"v000002"}
    publish(explorer, 2, -2.5)
    wait_until(lambda: version_states(explorer).get(2) == "REJECTED")
    wait_until(lambda: served(explorer) == "1")
    assert scripted_engine.script.loaded == "v000001"
    assert not scripted_engine.script.paused
    publish(explorer, 3, -3.5)
    wait_until(lambda: served(explorer) == "3")


def test_a_damaged_version_folder_never_reaches_an_engine(explorer, scripted_engine):
    publish(explorer, 1)
    wait_until(lambda: served(explorer) == "1")
    folder = write_scripted_version(explorer.config.root, 2, -2.0)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"X")
    with explorer.ledger.write() as connection:
        transitions.publish(connection, version=2, parent=1, kind="full", step=2)
    wait_until(lambda: version_states(explorer).get(2) == "REJECTED")
    assert "reload v000002" not in scripted_engine.script.calls
    assert served(explorer) == "1"


def test_an_explorer_that_starts_anew_finds_what_the_engine_serves(explorer, scripted_engine, start_explorer):
    publish(explorer, 1)
    wait_until(lambda: served(explorer) == "1")
    explorer.stop()
    calls = len(scripted_engine.script.calls)
    scripted_engine.script.paused = True  # the other one died within a reload
    again = start_explorer([scripted_engine.url]).wait_ready()
    assert served(again) == "1"
    assert scripted_engine.script.calls[calls:] == ["/resume"]
    assert not scripted_engine.script.paused


def test_several_engines_reload_one_at_a_time_while_the_others_serve(
    scripted_engine: ScriptedEngine, start_explorer: Callable[..., RunningExplorer]
):
    second = ScriptedEngine()
    scripts = [scripted_engine.script, second.script]
    try:
        explorer = start_explorer([scripted_engine.url, second.url])
        wait_until(lambda: len(explorer.deps.pool.serving) == 2)
        for script in scripts:
            script.hung_loads = {"v000001"}
        publish(explorer, 1)
        for already in (0, 1):
            wait_until(lambda already=already: len(reloading(scripts)) == 1 + already)
            for _ in range(4):
                reply = explorer.chat()  # answered by the engine that does not reload now
                assert (reply.status_code, reply.headers["X-Flywheel-Version"]) == (200, str(already))
            assert len(reloading(scripts)) == 1 + already, "both reloaded at once"
            for script in reloading(scripts):
                script.hung_loads = set()
        wait_until(lambda: [engine.version for engine in explorer.deps.pool.serving] == [1, 1])
        assert version_states(explorer) == {1: "SERVING"}
    finally:
        second.stop()


def reloading(scripts: list[Script]) -> list[Script]:
    """Those of the engines that reload, or have done so."""
    return [script for script in scripts if "reload v000001" in script.calls]


def test_rows_name_the_versions_that_sampled_their_first_and_last_token(explorer, scripted_engine):
    assert versions_of_a_stream_across(explorer, scripted_engine.script, 1) == (0, 1)


def test_versions_and_status_are_shown_in_a_terminal(explorer, capsys):
    publish(explorer, 1, -1.5)
    wait_until(lambda: served(explorer) == "1")
    assert run_here(explorer.config, "versions") == 0
    assert run_here(explorer.config, "status") == 0
    shown = capsys.readouterr().out
    assert "SERVING" in shown
    assert "RECORDED" in shown


@pytest.fixture
def failing_ledger(monkeypatch) -> Iterator[FailingLedger]:
    monkeypatch.setattr("explorer_service.reload.controller.HEALTH_INTERVAL_S", 0.1)  # until it looks again
    with failing_statements() as ledger:
        yield ledger


def test_a_ledger_error_at_any_statement_of_a_take_up_heals_by_itself(explorer, failing_ledger, scripted_engine):
    publish(explorer, 0)
    wait_until(lambda: served(explorer) == "0")

    def take_up(version: int, number: int, statement: str | None = None) -> bool:
        """Whether a statement of it was refused."""
        write_scripted_version(explorer.config.root, version, -1.0 - version)
        with explorer.ledger.write() as connection:
            transitions.publish(connection, version=version, parent=version - 1, kind="full", step=version)
            failing_ledger.arm(number, statement)
        wait_until(lambda: served(explorer) == str(version))
        assert version_states(explorer)[version] == "SERVING"
        assert scripted_engine.script.loaded == f"v{version:06d}" and not scripted_engine.script.paused
        return failing_ledger.refused is not None

    number = next(number for number in range(1, 60) if not take_up(number, number))
    for kind in ("UPDATE versions", "INSERT INTO decisions", "UPDATE engines SET owner_until", "UPDATE leases SET"):
        asked = [statement for statement in failing_ledger.met if statement.startswith(kind)]
        refused = [take_up(number + 1 + place, 1, statement) for place, statement in enumerate(asked)]
        assert any(refused), kind
        number += len(asked)


def test_a_failed_load_is_put_back_although_the_ledger_fails_at_any_statement(
    explorer, failing_ledger, scripted_engine
):
    publish(explorer, 0)
    wait_until(lambda: served(explorer) == "0")
    for number, statement in enumerate(range(1, 80, 1 if FULL else 3), 1):
        scripted_engine.script.wrong_probe_for = {f"v{number:06d}"}
        write_scripted_version(explorer.config.root, number, -1.0 - number)
        with explorer.ledger.write() as connection:
            transitions.publish(connection, version=number, parent=number - 1, kind="full", step=number)
            failing_ledger.arm(statement)
        wait_until(lambda: version_states(explorer)[number] == "REJECTED")  # noqa: B023 — called at once
        wait_until(lambda: served(explorer) == "0")
        assert scripted_engine.script.loaded == "v000000" and not scripted_engine.script.paused
        if failing_ledger.refused is None:
            return
    raise AssertionError("a take-up has more statements than this test")


def test_a_load_that_fails_is_undone_before_the_engine_resumes_and_streams_go_on_whole(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], reload={"poll_interval_s": 0.02, "drain_s": 0.0}).wait_ready()
    publish(explorer, 0)
    publish(explorer, 1, -1.5)
    wait_until(lambda: served(explorer) == "1")
    script = scripted_engine.script
    script.failed_loads, calls = {"v000002"}, len(script.calls)
    script.stream_slowly()
    with explorer.http.stream("POST", "/chat", json={"messages": [], "stream": True}) as reply:
        events = reply.iter_lines()
        msg_id = json.loads(next(events).removeprefix("data: "))["id"]
        publish(explorer, 2, -2.5)
        wait_until(lambda: version_states(explorer)[2] == "REJECTED")
        script.gap_s = 0.0
        assert [line for line in events if line][-1] == "data: [DONE]"
    wait_until(lambda: served(explorer) == "1")
    assert script.calls[calls:] == ["/pause", "reload v000002", "reload v000001", "/reset_prefix_cache", "/resume"]
    with explorer.ledger.read() as connection:
        columns = select(experiences.c.version, experiences.c.version_end)
        assert connection.execute(columns.where(experiences.c.msg_id == msg_id)).one() == (1, 1)


def test_a_ledger_that_is_away_now_and_then_ends_no_controller_whenever_it_is_asked(
    explorer, scripted_engine, monkeypatch
):
    wanted, draw, outages = VersionPoller.wanted, random.Random(1), []

    def wanted_or_not(poller: VersionPoller) -> VersionRow | None:
        if draw.random() < 0.5:
            outages.append("the database is unavailable")
            raise LedgerError(outages[-1])
        return wanted(poller)

    monkeypatch.setattr(VersionPoller, "wanted", wanted_or_not)
    publish(explorer, 1)
    wait_until(lambda: served(explorer) == "1" and len(outages) > 10)
    assert explorer.background.failed is None
