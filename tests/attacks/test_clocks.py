"""Clocks that were put back, or are ahead: they hold no lease, and take none of another."""

from __future__ import annotations

import time

from sqlalchemy import insert, text, update

from shared.config import ledger_url
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import explorers
from tests.support.experiences import make_experiences, record_ready
from tests.support.models import make_tiny_model


def test_a_lease_by_a_clock_that_was_put_back_holds_no_engine(explorer):
    ahead = {"owner": "ghost", "owner_until": time.time() + 3600}
    with explorer.ledger.write() as connection:
        connection.execute(update(explorers).values(heartbeat_at=time.time() + 3))  # however busy the machine is
        connection.execute(text("UPDATE engines SET owner = :owner, owner_until = :owner_until"), ahead)
        url = connection.execute(text("SELECT url FROM engines")).scalar_one()
        heartbeat = {"id": "ghost", "acknowledged": b"{}", "heartbeat_at": time.time() + 3600}
        connection.execute(insert(explorers).values(heartbeat))
        assert transitions.acquire_engine(connection, url, "me")
        assert len(transitions.heartbeat(connection, "me", {})) == 1, "the explorer itself"


def test_a_trainer_whose_host_is_an_hour_ahead_takes_no_lease_of_another(postgres, tmp_path, monkeypatch):
    ledger = Ledger.open(ledger_url(postgres.new_database()))
    record_ready(ledger, make_experiences(make_tiny_model(tmp_path / "base"), 4))
    with ledger.write() as connection:
        assert transitions.claim(connection, owner="right", at_least=4, at_most=4, lease_s=60) is not None
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 3600)
        assert not queries.any_lease_expired(connection)
        assert transitions.give_back(connection) == 0
    ledger.close()
