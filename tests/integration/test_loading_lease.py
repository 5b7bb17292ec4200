"""An engine that loads a version has its files until it serves, whatever becomes of the version meanwhile."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from shared.experience import Purpose
from shared.ledger import transitions
from shared.ledger.queries import list_versions
from shared.ledger.tables import version_leases
from tests.support.servers import publish, served, wait_until

pytestmark = pytest.mark.usefixtures("patient_health")


def loading(explorer) -> list[int]:
    with explorer.ledger.read() as connection:
        query = select(version_leases.c.version).where(version_leases.c.purpose == Purpose.LOADING)
        return list(connection.execute(query).scalars())


def state(explorer, version: int) -> str:
    with explorer.ledger.read() as connection:
        return next(row.state for row in list_versions(connection) if row.version == version)


def give_up_all(explorer) -> list[int]:
    with explorer.ledger.write() as connection:
        sizes = dict.fromkeys(range(10), 1)
        return transitions.give_up_files(
            connection, owner="janitor", max_versions=1, max_bytes=1, sizes=sizes, by="janitor"
        )


def test_files_that_an_engine_loads_stay_though_a_newer_version_has_come(explorer, scripted_engine):
    publish(explorer, 0)
    wait_until(lambda: served(explorer) == "0")
    scripted_engine.script.hung_loads = {"v000001"}
    publish(explorer, 1, -2.0)
    wait_until(lambda: "reload v000001" in scripted_engine.script.calls)
    publish(explorer, 2, -3.0)
    assert 1 in loading(explorer)
    assert give_up_all(explorer) == []
    scripted_engine.script.hung_loads = set()
    wait_until(lambda: served(explorer) == "2")
    assert loading(explorer) == []


def test_a_load_that_fails_holds_nothing_for_ever(explorer, scripted_engine):
    publish(explorer, 0)
    wait_until(lambda: served(explorer) == "0")
    scripted_engine.script.failed_loads.add("v000001")
    publish(explorer, 1, -2.0)
    wait_until(lambda: state(explorer, 1) == "REJECTED")
    publish(explorer, 2, -3.0)
    wait_until(lambda: served(explorer) == "2")
    assert loading(explorer) == []
