"""Erasing: nothing readable is left, what was trained on is named, and a trainer never meets an empty row."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select

from services.operate import _ranges, erase
from shared.errors import ConfigError
from shared.ledger import transitions
from shared.ledger.tables import experiences, payloads, signals


def chats(explorer, task: str, count: int) -> list[str]:
    ids = [explorer.chat(metadata={"task_id": task}).json()["id"] for _ in range(count)]
    explorer.http.post("/feedback", json={"msg_ids": ids, "reward": 1, "comment": "private"})
    return ids


def test_an_erased_task_leaves_nothing_to_read_and_names_its_versions(explorer, capsys):
    gone, kept = chats(explorer, "gone", 3), chats(explorer, "kept", 2)
    explorer.http.post("/commit")
    with explorer.ledger.write() as connection:
        batch = transitions.claim(connection, owner="t", at_least=1, at_most=1, lease_s=60)
        transitions.announce_trainer(connection, name="t", step=0, version=0, state_path=None)
        transitions.publish(
            connection, version=1, parent=0, kind="full", step=1, trainer="t", batch_ids=[batch], state_path="x"
        )
        leased = transitions.claim(connection, owner="t", at_least=1, at_most=1, lease_s=60)
    assert erase(explorer.config, task_id="gone") == 0
    assert "3 rows erased; they went into versions 1" in capsys.readouterr().out
    with explorer.ledger.read() as connection:
        left = connection.execute(select(experiences.c.msg_id).join(payloads)).scalars().all()
        said = set(connection.execute(select(signals.c.msg_id)).scalars())
        states = dict(connection.execute(select(experiences.c.msg_id, experiences.c.state)).all())
    assert set(left) == said == set(kept)
    assert [states[name] for name in gone] == ["CONSUMED", "LEASED", "DISCARDED"]
    with explorer.ledger.write() as connection:
        assert list(transitions.load_lease(connection, leased).corrupt.values()) == ["its tokens were erased"]


def test_an_erasure_names_whose_rows(explorer):
    chats(explorer, "t", 1)
    with pytest.raises(ConfigError, match="name whose rows"):
        erase(explorer.config)
    with explorer.ledger.read() as connection:
        assert connection.execute(select(func.count()).select_from(payloads)).scalar() == 1


def test_ranges_by_hand():
    assert _ranges({1, 2, 3, 7, 9, 10}) == "versions 1-3, 7, 9-10"
