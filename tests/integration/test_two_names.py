"""Two explorers that name one engine by different urls: one of them owns it, and the other says why it does not."""

from __future__ import annotations

import logging
import time

from sqlalchemy import select

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


def shown(explorer) -> dict[str, object]:
    """The engine in GET /status."""
    (engine,) = explorer.http.get("/status").json()["engines"]
    return engine
