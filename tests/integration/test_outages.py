"""An engine that goes out of service is named once in the log, and in the metrics for as long as it is out."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest
from sqlalchemy import Engine, event

from shared.errors import LedgerError
from shared.ledger.queries import read_engine
from tests.support.forms import one_database
from tests.support.servers import publish, served, wait_until

pytestmark = [pytest.mark.usefixtures("patient_health"), one_database]


def value(explorer, name, engine="e0"):
    """Of a metric of an engine."""
    found = re.search(
        rf'^flywheel_{name}{{engine="{engine}"}} (\S+)$', explorer.http.get("/metrics").text, re.MULTILINE
    )
    assert found
    return float(found[1])


def lose_a_chat(script):
    script.healthy, script.die_on_chat = False, True


def answer_500(script):
    script.on_call["/v1/chat/completions"] = lambda: setattr(script, "healthy", False)
    script.refused.add("/v1/chat/completions")


def fail_health(script):
    script.healthy = False


def mend(script):
    script.healthy, script.die_on_chat = True, False
    script.on_call.pop("/v1/chat/completions", None)
    script.refused.clear()


@pytest.mark.parametrize("end", [lose_a_chat, answer_500, fail_health])
def test_an_engine_that_becomes_unavailable_is_one_warning_for_each_outage(end, explorer, scripted_engine, caplog):
    script, asked = scripted_engine.script, []
    (engine,) = explorer.deps.pool.engines
    script.on_call["/health"] = lambda: asked.append("/health")

    def warnings():
        return [one.getMessage() for one in caplog.records if "engine is unavailable" in one.getMessage()]

    for outage in (1, 2):
        end(script)
        explorer.chat()
        wait_until(lambda: engine.state == "unavailable")
        asked.clear()
        wait_until(lambda: len(asked) > 5)
        assert explorer.chat().status_code == 503
        assert len(warnings()) == outage and "engine=e0 reason=" in warnings()[-1]
        assert all(one.levelname == "WARNING" for one in caplog.records if "unavailable" in one.getMessage())
        mend(script)
        explorer.wait_ready()


def test_an_answer_from_before_the_engine_was_lost_does_not_bring_it_back(explorer, scripted_engine, caplog):
    (engine,) = explorer.deps.pool.engines
    admin = explorer.deps.dispatcher._health_checks["e0"].__self__
    check, held, script = admin.check_health, threading.Event(), scripted_engine.script

    async def answer_late():
        if not held.is_set():
            await check()
            held.set()
            while engine.state != "unavailable":  # noqa: ASYNC110 — the pool has no event for it
                await asyncio.sleep(0.01)
        else:
            await check()

    admin.check_health = answer_late
    assert held.wait(60)
    lose_a_chat(script)
    assert explorer.chat().status_code == 503
    asked = []
    script.on_call["/health"] = lambda: asked.append("/health")
    wait_until(lambda: len(asked) > 2)
    assert caplog.text.count("engine is unavailable") == 1
    mend(script)
    explorer.wait_ready()


@pytest.mark.parametrize("end", [lose_a_chat, fail_health])
def test_whoever_finds_an_engine_gone_its_owner_tells_the_other_explorers(end, explorer, scripted_engine):
    (engine,) = explorer.deps.pool.engines

    def told():
        with explorer.ledger.read() as connection:
            return read_engine(connection, explorer.deps.leases.key(engine.url)).state

    wait_until(lambda: told() == "serving")
    end(scripted_engine.script)
    explorer.chat()
    wait_until(lambda: told() == "unavailable")


def test_the_metrics_say_which_engine_gets_chats_and_name_no_version_for_one_that_is_out(explorer, scripted_engine):
    publish(explorer, 1)
    wait_until(lambda: served(explorer) == "1")
    wait_until(lambda: (value(explorer, "engine_up"), value(explorer, "reload_version_number")) == (1, 1))
    lose_a_chat(scripted_engine.script)
    assert explorer.chat().status_code == 503
    wait_until(lambda: (value(explorer, "engine_up"), value(explorer, "reload_version_number")) == (0, -1))
    mend(scripted_engine.script)
    wait_until(lambda: (value(explorer, "engine_up"), value(explorer, "reload_version_number")) == (1, 1))


def test_an_engine_that_was_never_there_is_down_in_the_metrics(start_explorer):
    explorer = start_explorer(["http://127.0.0.1:1"])
    assert (value(explorer, "engine_up"), value(explorer, "reload_version_number")) == (0, -1)


def test_an_outage_of_the_ledger_is_one_warning_however_many_engines_there_are(
    scripted_engine, second_engine, start_explorer, caplog, monkeypatch
):
    for module in ("controller", "health"):
        monkeypatch.setattr(f"explorer_service.reload.{module}.HEALTH_INTERVAL_S", 0.1)
    scripts, asked = [scripted_engine.script, second_engine.script], []
    explorer = start_explorer([scripted_engine.url, second_engine.url])
    wait_until(lambda: all(engine.state == "serving" for engine in explorer.deps.pool.engines))
    for number, script in enumerate(scripts):
        script.on_call["/health"] = lambda number=number: asked.append(number)

    def refuse(*_):
        if threading.current_thread() is not threading.main_thread():
            raise LedgerError("the disk is away")

    event.listen(Engine, "before_cursor_execute", refuse)
    try:
        wait_until(lambda: "new versions are not seen" in caplog.text)
        asked.clear()
        wait_until(lambda: min(asked.count(number) for number in range(2)) > 2)  # both have met the outage
        assert caplog.text.count("new versions are not seen") == 1
    finally:
        event.remove(Engine, "before_cursor_execute", refuse)
