"""One url that is another engine on each host, like a container's name: only the owner's engine serves."""

from __future__ import annotations

import logging
import time

import pytest
from sqlalchemy import select

from shared.ledger.tables import engines
from tests.support.postgres import sqlite_alone
from tests.support.reloads import SETTINGS, shown
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import publish, served, wait_joined, wait_until

database_url = sqlite_alone  # nothing here depends on the database
URL = "http://engine:8101"


@pytest.fixture
def other_engine():
    engine = ScriptedEngine()
    yield engine
    engine.stop()


@pytest.fixture
def hosts(scripted_engine, other_engine, start_explorer, monkeypatch):
    """Explorers on two hosts, each with an engine of its own behind the same url. The first explorer is the owner."""
    monkeypatch.setattr("explorer_service.reload.ownership.engine_key", lambda _engine: URL)
    scripted_engine.script.identity, other_engine.script.identity = "first", "second"
    owner = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    other = start_explorer([other_engine.url], reload=SETTINGS, engine_wait_s=0.1)
    wait_joined([owner, other])
    return owner, other


def test_an_engine_that_is_not_the_owners_does_not_serve_under_the_version_of_the_owners(hosts, other_engine, caplog):
    owner, other = hosts
    with caplog.at_level(logging.ERROR, "flywheel.reload"):
        for version in (1, 2):
            publish(owner, version)
            wait_until(lambda version=version: served(owner) == str(version))
        wait_until(lambda: "its owner serves version 2, but it holds 'default'" in shown(other)["reason"])
        assert "names another engine on the owner's host" in shown(other)["reason"]
        assert other.chat().status_code == 503
        time.sleep(2.5)  # it is looked at again meanwhile
    assert not [call for call in other_engine.script.calls if call.startswith("reload")]
    assert len([record for record in caplog.records if "it holds 'default'" in record.getMessage()]) <= 2
    with owner.ledger.read() as connection:
        owners = {row.url: row.owner for row in connection.execute(select(engines.c.url, engines.c.owner))}
    mine = owner.deps.membership.id
    assert owners == {URL: mine, "engine first": mine, "engine second": None}


def test_the_weights_that_engines_were_started_with_are_served_as_version_0_by_both(hosts):
    assert [served(explorer.wait_ready()) for explorer in hosts] == ["0", "0"]


def test_an_engine_that_comes_to_hold_its_owners_version_serves_it(hosts, other_engine):
    owner, other = hosts
    folder = publish(owner, 1)
    wait_until(lambda: "names another engine" in shown(other)["reason"])
    other_engine.start_on(folder)
    wait_until(lambda: served(other) == "1")
