"""An explorer follows an engine whose owner is another one, also where it does not reach the engine."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import select, update

from explorer_service.errors import EngineUnavailable
from shared.ledger import transitions
from shared.ledger.tables import engines
from tests.support.postgres import sqlite_alone
from tests.support.reloads import SETTINGS, shown
from tests.support.servers import RunningExplorer, publish, served, wait_joined, wait_until

database_url = sqlite_alone  # nothing here depends on the database


class Followed:
    """An engine whose owner does nothing more, and the explorer that follows it."""

    def __init__(self, owner: RunningExplorer, follower: RunningExplorer) -> None:
        self.owner, self.follower = owner, follower
        self.admin = follower.deps.dispatcher._health_checks["e0"].__self__
        self._key = owner.deps.leases.key(owner.config.explorer.engines[0].url)

        async def stay_idle(_url: str) -> bool:
            return await asyncio.Event().wait()

        owner.deps.leases.acquire = stay_idle

    def announce(self, state: str, version: int | None) -> int:
        """Write the engine's row as its owner would. Returns the generation."""
        with self.owner.ledger.write() as connection:
            generation = transitions.set_engine_state(
                connection, self._key, self.owner.deps.membership.id, state, version
            )
        assert generation is not None
        return generation

    def cut_off(self) -> None:
        """The follower no longer reaches the engine."""

        async def fail(**_: object) -> None:
            raise EngineUnavailable("no route to host")

        self.admin.check_health = self.admin.read_label = fail

    def owner_dies(self) -> None:
        """The owner's lease has expired."""
        with self.owner.ledger.write() as connection:
            connection.execute(update(engines).values(owner="dead", owner_until=0.0))

    def read_owner(self) -> str | None:
        with self.owner.ledger.read() as connection:
            return connection.execute(select(engines.c.owner)).scalar_one()

    def show_state(self) -> object:
        return shown(self.follower)["state"]

    def acknowledged(self) -> int:
        return self.follower.deps.membership.acknowledged[self._key].generation


@pytest.fixture
def followed(scripted_engine, start_explorer, lasting_leases) -> Followed:
    both = [start_explorer([scripted_engine.url], reload=SETTINGS, engine_wait_s=60.0).wait_ready() for _ in range(2)]
    publish(both[0], 0)
    wait_until(lambda: all(served(explorer) == "0" for explorer in both))
    wait_joined(both)
    return Followed(*sorted(both, key=lambda explorer: not shown(explorer)["owned"]))


def test_an_engine_that_its_owner_checks_after_a_reload_is_shown_as_checking(followed):
    followed.announce("reloading", 0)
    wait_until(lambda: followed.show_state() == "reloading")
    followed.announce("checking", None)
    wait_until(lambda: followed.show_state() == "checking")


def test_only_an_explorer_that_reaches_an_engine_acknowledges_that_its_owner_does_not(followed):
    followed.announce("reloading", 0)
    wait_until(lambda: followed.show_state() == "reloading")
    followed.cut_off()
    away = followed.announce("unavailable", None)
    wait_until(lambda: followed.show_state() == "unavailable")
    assert followed.acknowledged() < away
    del followed.admin.check_health, followed.admin.read_label
    wait_until(lambda: followed.acknowledged() == away)


def test_an_explorer_that_does_not_reach_an_engine_delays_no_reload_of_it(followed):
    followed.cut_off()
    wait_until(lambda: followed.show_state() == "unavailable")
    reloading = followed.announce("reloading", 0)
    wait_until(lambda: followed.acknowledged() == reloading)
    assert followed.show_state() == "unavailable"


def test_an_explorer_that_does_not_reach_an_engine_keeps_no_lease_on_it_if_its_owner_dies_in_a_reload(followed):
    followed.announce("reloading", 0)
    wait_until(lambda: followed.show_state() == "reloading")
    followed.cut_off()
    followed.owner_dies()
    wait_until(lambda: followed.read_owner() is None)
    del followed.admin.check_health, followed.admin.read_label
    wait_until(lambda: followed.show_state() == "serving")
