"""Rows that a version of this ledger was trained on stay trained on when their archive is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from shared.config import RewardConfig
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import count_by_state
from shared.ledger.tables import experiences, lineage, payloads, signals, versions
from shared.reward import SCORES, Signal
from tests.support.processes import run_here
from tests.support.samples import sample

RUN = {"task_id": "t", "run_id": "0"}
TRAINED = ("msg_id", "state", "reward", "teaches", "taught", "consumed_version")


def feedback(ledger: Ledger, *said: Signal, **about: Any) -> str:
    target = {"msg_ids": [], "task_id": None, "run_id": None, **about}
    with ledger.write() as connection:
        applied = {"rule": RewardConfig(), "learned": SCORES | {"correction"}}
        return transitions.apply_feedback(connection, signals=list(said), **target, **applied)[0].state


def committed(ledger: Ledger) -> int:
    with ledger.write() as connection:
        return transitions.commit(connection, **RUN)[0]


def trained(ledger: Ledger) -> list[tuple]:
    query = select(*(experiences.c[name] for name in TRAINED)).order_by(experiences.c.id)
    with ledger.read() as connection:
        return [tuple(row) for row in connection.execute(query)]


@pytest.fixture
def archived(ledger: Ledger, config, tmp_path: Path) -> tuple[Path, list[tuple]]:
    """A run that version 1 was trained on: its file, and what the ledger said of its rows."""
    with ledger.write() as connection:
        transitions.record(connection, [sample(f"m{number}", **RUN) for number in range(2)])
    feedback(ledger, Signal("reward", 1.0), **RUN)
    committed(ledger)
    with ledger.write() as connection:
        batch = transitions.claim(connection, owner="trainer", at_least=2, at_most=2, lease_s=60.0)
        about = {"parent": None, "kind": "full", "step": 1, "manifest_sha256": "1" * 64}
        transitions.publish(connection, version=1, trainer="trainer", batch_ids=[batch], state_path="s1", **about)
    before = trained(ledger)
    run_here(config, "archive", "--to", str(tmp_path / "archive"), "--older-than-days", "0")
    assert trained(ledger) == []
    (file,) = (tmp_path / "archive").iterdir()
    return file, before


def test_an_imported_archive_is_not_trained_on_again(ledger, config, archived):
    file, before = archived
    assert run_here(config, "import", str(file), "--commit") == 0
    assert trained(ledger) == before
    assert committed(ledger) == 0
    assert feedback(ledger, Signal("reward", -1.0), **RUN) == "already_trained"
    assert committed(ledger) == 0


def test_a_new_lesson_about_an_imported_row_is_trained_on(ledger, config, archived):
    assert run_here(config, "import", str(archived[0])) == 0
    assert feedback(ledger, Signal("correction", text="better"), msg_ids=["m1"]) == "applied"
    assert committed(ledger) == 1


def test_an_imported_archive_names_each_version_that_was_trained_on_a_row(ledger, config, tmp_path, capsys):
    with ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
        transitions.record(connection, [sample("m0", **RUN)])
    for version, said in ((1, Signal("reward", 1.0)), (2, Signal("correction", text="better"))):
        feedback(ledger, said, **RUN)
        committed(ledger)
        with ledger.write() as connection:
            batch = transitions.claim(connection, owner="trainer", at_least=1, at_most=1, lease_s=60.0)
            about = {"parent": version - 1, "kind": "full", "step": 1, "manifest_sha256": str(version) * 64}
            trainer = {"trainer": "trainer", "batch_ids": [batch], "state_path": f"s{version}"}
            transitions.publish(connection, version=version, **about, **trainer)
    with ledger.write() as connection:
        about |= {"manifest_sha256": "3" * 64, "trained_on": [1]}
        transitions.publish(connection, version=3, trainer="other", **about)
    assert whole_lineage(ledger) == [(1, True), (2, True), (3, False)]
    run_here(config, "archive", "--to", str(tmp_path / "archive"), "--older-than-days", "0")
    (file,) = (tmp_path / "archive").iterdir()
    assert run_here(config, "import", str(file)) == 0
    assert whole_lineage(ledger) == [(1, True), (2, True), (3, False)]
    assert run_here(config, "erase", "--message", "m0") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 rows erased; they went into versions 1-3"


def whole_lineage(ledger: Ledger) -> list[tuple]:
    with ledger.read() as connection:
        return [
            tuple(row) for row in connection.execute(select(lineage.c.version, lineage.c.consumed).order_by("version"))
        ]


WHY = "quarantined: each trainer died in an update with it alone"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_row_in_quarantine_stays_there_and_one_that_only_expired_is_new(ledger, config, tmp_path, name):
    with ledger.write() as connection:
        transitions.record(connection, [sample(f"m{number}", **RUN) for number in range(3)])
    feedback(ledger, Signal("reward", 1.0), **RUN)
    for msg_id, reason in (("m0", WHY), ("m1", "expired: nothing was said in time")):
        discard(ledger, msg_id, reason)
    run_here(config, "export", "--tokens", "--out", str(tmp_path / name))
    with ledger.write() as connection:
        for table in (signals, payloads, experiences):
            connection.execute(table.delete())
    assert run_here(config, "import", str(tmp_path / name), "--commit") == 0
    assert states(ledger) == [("m0", "DISCARDED", WHY), ("m1", "READY", None), ("m2", "READY", None)]


def test_a_row_in_quarantine_that_was_trained_on_before_stays_there(ledger, config, tmp_path, archived):
    assert run_here(config, "import", str(archived[0])) == 0
    feedback(ledger, Signal("correction", text="better"), msg_ids=["m1"])
    discard(ledger, "m1", WHY)
    run_here(config, "archive", "--to", str(tmp_path / "again"), "--older-than-days", "0")
    for file in (tmp_path / "again").iterdir():
        assert run_here(config, "import", str(file), "--commit") == 0
    assert states(ledger) == [("m0", "CONSUMED", None), ("m1", "DISCARDED", WHY)]
    assert [row[-1] for row in trained(ledger)] == [1, 1]


def discard(ledger: Ledger, msg_id: str, reason: str) -> None:
    with ledger.write() as connection:
        one = update(experiences).where(experiences.c.msg_id == msg_id)
        connection.execute(one.values(state="DISCARDED", reason=reason))


def states(ledger: Ledger) -> list[tuple]:
    named = select(*(experiences.c[name] for name in ("msg_id", "state", "reason"))).order_by(experiences.c.msg_id)
    with ledger.read() as connection:
        return [tuple(row) for row in connection.execute(named)]


def test_rows_that_another_ledgers_version_was_trained_on_are_imported_as_new(ledger, config, archived):
    with ledger.write() as connection:
        connection.execute(update(versions).where(versions.c.version == 1).values(manifest_sha256="2" * 64))
    assert run_here(config, "import", str(archived[0]), "--commit") == 0
    with ledger.read() as connection:
        assert count_by_state(connection)["READY"] == 2


def test_a_parquet_export_says_what_was_trained_on_too(ledger, config, archived, tmp_path: Path):
    file, before = archived
    assert run_here(config, "import", str(file)) == 0
    run_here(config, "export", "--tokens", "--out", str(tmp_path / "rows.parquet"))
    with ledger.write() as connection:
        transitions.remove(connection, connection.execute(select(experiences.c.id)).scalars().all())
    assert trained(ledger) == []
    assert run_here(config, "import", str(tmp_path / "rows.parquet"), "--commit") == 0
    assert trained(ledger) == before
