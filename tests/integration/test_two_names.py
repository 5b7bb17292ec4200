"""Two explorers that name one engine by different urls: one of them owns it, and the other says why it does not."""

from __future__ import annotations

import logging
import time

import httpx
from sqlalchemy import select

from explorer_service.engines.admin import EngineAdmin
from shared.ledger.tables import engines
from tests.support.servers import publish, served, wait_joined, wait_until


def test_every_name_of_this_machine_is_one_engine_with_one_owner(scripted_engine, start_explorer):
    port = scripted_engine.url.rpartition(":")[2]
    urls = [scripted_engine.url, f"http://localhost:{port}"]
    both = [start_explorer([url]).wait_ready() for url in urls]
    wait_joined(both)
    publish(both[0], 1)
    wait_until(lambda: all(served(explorer) == "1" for explorer in both))
    assert scripted_engine.script.calls.count("reload v000001") == 1
    with both[0].ledger.read() as connection:
        assert len(connection.execute(select(engines.c.url)).all()) == 1


def test_an_engine_that_two_explorers_name_by_different_urls_is_served_by_one_and_the_other_says_why(
    scripted_engine, start_explorer, caplog
):
    scripted_engine.script.identity = "one-engine"
    port = scripted_engine.url.rpartition(":")[2]
    first = start_explorer([scripted_engine.url]).wait_ready()
    with caplog.at_level(logging.ERROR, "flywheel.reload"):
        second = start_explorer([f"http://127.1:{port}"], engine_wait_s=0.1)
        wait_until(lambda: "by another url" in shown(second)["reason"])
        publish(first, 1)
        wait_until(lambda: served(first) == "1")
        time.sleep(2.5)  # the second explorer looks again meanwhile
    (line,) = [record.getMessage() for record in caplog.records if "by another url" in record.getMessage()]
    assert first.deps.membership.id in line and scripted_engine.url in line
    assert (first.chat().status_code, second.chat().status_code) == (200, 503)
    assert scripted_engine.script.calls.count("reload v000001") == 1
    first.stop()
    second.wait_ready()
    assert served(second) == "1" and scripted_engine.script.calls.count("reload v000001") == 1


def test_an_owner_that_lost_its_engine_to_an_explorer_with_another_url_stops_serving_from_it(
    scripted_engine, start_explorer
):
    """As after a time in which it could not reach the ledger."""
    scripted_engine.script.identity = "one-engine"
    explorer = start_explorer([scripted_engine.url], engine_wait_s=0.1).wait_ready()
    with explorer.ledger.write() as connection:
        lost = {"owner": "other", "owner_until": time.time() + 11}
        names = connection.execute(select(engines.c.url)).scalars().all()
        (identity,) = [name for name in names if "one-engine" in name]
        connection.execute(engines.update().where(engines.c.url == identity).values(lost))
        connection.execute(engines.insert().values(url="http://engine-a:8101", state="serving", generation=1, **lost))
    wait_until(lambda: "explorer other owns it by another url (http://engine-a:8101)" in shown(explorer)["reason"])
    assert explorer.chat().status_code == 503


def test_an_owner_with_the_same_url_is_followed_even_if_one_of_its_leases_ends_first(scripted_engine, start_explorer):
    scripted_engine.script.identity = "one-engine"
    explorer = start_explorer([scripted_engine.url], engine_wait_s=0.1).wait_ready()
    with explorer.ledger.write() as connection:
        connection.execute(engines.update().values(owner="other", owner_until=time.time() - 1))
        identity = engines.c.url.contains("one-engine")
        connection.execute(engines.update().where(identity).values(owner_until=time.time() + 8))
    wait_until(lambda: not shown(explorer)["owned"])
    for _ in range(5):
        assert explorer.chat().status_code == 200 and not shown(explorer)["reason"]
        time.sleep(0.2)
    wait_until(lambda: shown(explorer)["owned"])


def test_an_engine_without_a_name_of_its_own_is_owned_by_its_url_alone(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url]).wait_ready()
    with explorer.ledger.read() as connection:
        (url,) = connection.execute(select(engines.c.url)).scalars()
    assert url.endswith(scripted_engine.url) and shown(explorer)["owned"]


def test_an_engine_that_is_replaced_by_another_one_is_owned_under_the_new_ones_name(scripted_engine, start_explorer):
    scripted_engine.script.identity = "first"
    explorer = start_explorer([scripted_engine.url]).wait_ready()
    scripted_engine.script.healthy = False
    wait_until(lambda: shown(explorer)["state"] == "unavailable")
    scripted_engine.script.identity = "second"
    scripted_engine.script.healthy = True
    explorer.wait_ready()
    with explorer.ledger.read() as connection:
        owned = select(engines.c.url).where(engines.c.owner.is_not(None))
        (identity, _) = sorted(connection.execute(owned).scalars(), key=len)
    assert "second" in identity


def test_one_explorer_that_names_an_engine_twice_uses_it_by_one_of_the_urls_and_says_so(
    scripted_engine, start_explorer
):
    scripted_engine.script.identity = "one-engine"
    port = scripted_engine.url.rpartition(":")[2]
    explorer = start_explorer([scripted_engine.url, f"http://127.1:{port}"], engine_wait_s=60.0).wait_ready()
    wait_until(lambda: len(unused(explorer)) == 1)
    publish(explorer, 1)
    wait_until(lambda: served(explorer) == "1")
    time.sleep(2.5)  # both are looked at again meanwhile
    (other,) = unused(explorer)
    (used,) = [engine for engine in all_shown(explorer) if engine["name"] != other["name"]]
    assert (used["state"], used["reason"], other["owned"], other["state"]) == ("serving", "", False, "checking")
    assert f"engine {used['name']} of this file is the same engine" in other["reason"]
    assert scripted_engine.script.calls.count("reload v000001") == 1
    assert sum(name.startswith("engine ") for name in owned(explorer)) == 1 and len(owned(explorer)) == 2


def test_an_engine_that_an_explorer_names_twice_is_used_by_the_other_url_if_the_first_one_does_not_lead_there(
    scripted_engine, start_explorer, monkeypatch
):
    scripted_engine.script.identity = "one-engine"
    port = scripted_engine.url.rpartition(":")[2]
    explorer = start_explorer([scripted_engine.url, f"http://127.1:{port}"]).wait_ready()
    wait_until(lambda: len(unused(explorer)) == 1)
    (other,) = unused(explorer)
    (used,) = [engine for engine in all_shown(explorer) if engine["name"] != other["name"]]
    cut_off(monkeypatch, str(used["url"]))
    wait_until(lambda: {"serving", "unavailable"} == {str(engine["state"]) for engine in all_shown(explorer)})
    assert explorer.chat().status_code == 200 and not unused(explorer)


def test_an_owner_that_does_not_reach_its_engine_leaves_it_to_an_explorer_with_another_url(
    scripted_engine, start_explorer, monkeypatch
):
    scripted_engine.script.identity = "one-engine"
    port = scripted_engine.url.rpartition(":")[2]
    first = start_explorer([scripted_engine.url], engine_wait_s=0.1).wait_ready()
    second = start_explorer([f"http://127.1:{port}"], engine_wait_s=0.1)
    wait_until(lambda: "by another url" in shown(second)["reason"])
    with monkeypatch.context() as patch:
        cut_off(patch, scripted_engine.url)
        wait_until(lambda: shown(first)["state"] == "unavailable")
        wait_until(lambda: second.chat().status_code == 200)
        assert "engine one-engine" in owned(second) and shown(second)["owned"]
    wait_until(lambda: "by another url" in shown(first)["reason"])
    assert (first.chat().status_code, second.chat().status_code) == (503, 200)


def test_an_owner_that_does_not_reach_its_engine_keeps_it_until_its_own_requests_there_have_ended(
    scripted_engine, start_explorer, monkeypatch
):
    """The next owner knows nothing of them, and may load a version under them."""
    scripted_engine.script.identity = "one-engine"
    explorer = start_explorer([scripted_engine.url]).wait_ready()
    scripted_engine.script.streams_wait = True
    with explorer.http.stream("POST", "/chat", json={"messages": [], "stream": True}) as reply:
        events = reply.iter_lines()
        next(events)
        cut_off(monkeypatch, scripted_engine.url)
        wait_until(lambda: shown(explorer)["state"] == "unavailable")
        time.sleep(2.5)
        assert "engine one-engine" in owned(explorer)
        scripted_engine.script.streams_wait = False
        assert [event for event in events if event][-1] == "data: [DONE]"
    wait_until(lambda: "engine one-engine" not in owned(explorer))
    assert len(owned(explorer)) == 1


def test_an_engine_that_cannot_tell_its_name_for_a_moment_does_not_count_as_one_without_a_name(
    scripted_engine, start_explorer
):
    scripted_engine.script.identity = "one-engine"
    scripted_engine.script.refused.add("/flywheel/identity")
    explorer = start_explorer([scripted_engine.url])
    wait_until(lambda: "answered 500" in shown(explorer)["reason"])
    scripted_engine.script.refused.clear()
    explorer.wait_ready()
    assert "engine one-engine" in owned(explorer)


def cut_off(patch, url: str) -> None:
    """No connection for the administration of the engine at that url can be opened."""
    exchange = EngineAdmin._exchange

    async def fail(admin: EngineAdmin, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        if admin.url == url:
            raise httpx.ConnectError("cut off")
        return await exchange(admin, method, path, data)

    patch.setattr(EngineAdmin, "_exchange", fail)


def owned(explorer) -> set[str]:
    """The names in the ledger that an explorer has leased."""
    with explorer.ledger.read() as connection:
        mine = select(engines.c.url).where(engines.c.owner == explorer.deps.membership.id)
        return set(connection.execute(mine).scalars())


def unused(explorer) -> list[dict[str, object]]:
    """The engines that are the same as another one of the explorer's file."""
    return [engine for engine in all_shown(explorer) if "is the same engine" in str(engine["reason"])]


def all_shown(explorer) -> list[dict[str, object]]:
    """The engines in GET /status."""
    found: list[dict[str, object]] = explorer.http.get("/status").json()["engines"]
    return found


def shown(explorer) -> dict[str, object]:
    """The engine in GET /status."""
    (engine,) = explorer.http.get("/status").json()["engines"]
    return engine
