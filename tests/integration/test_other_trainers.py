"""A trainer that starts while one of another name is at work on the same ledger says so."""

from __future__ import annotations

from sqlalchemy import update

from services.trainer import warn_of_others
from shared.ledger import transitions
from shared.ledger.queries import ledger_status
from shared.ledger.tables import trainers


def test_a_trainer_warns_once_of_others_that_are_alive_and_of_no_other(ledger, caplog):
    def warnings() -> list[str]:
        caplog.clear()
        warn_of_others(ledger, "new")
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    with ledger.write() as connection:
        for name in ("new", "first", "second", "stopped", "killed"):
            about = {"step": 0, "version": 0, "state_path": None, "state_sha256": None}
            transitions.announce_trainer(connection, name=name, **about)
        transitions.dismiss_trainer(connection, name="stopped")
        long_ago = trainers.c.heartbeat_at - 60.0
        connection.execute(update(trainers).where(trainers.c.name == "killed").values(heartbeat_at=long_ago))
    (line,) = warnings()
    assert "first, second" in line and "the same rows" in line and "trainer.name" in line
    assert "stopped" not in line and "killed" not in line
    alive = {one["name"] for one in ledger.fetch(ledger_status)["trainers"] if one["alive"]}
    assert alive == {"new", "first", "second"}
    with ledger.write() as connection:
        for name in ("first", "second"):
            transitions.dismiss_trainer(connection, name=name)
    assert warnings() == []
