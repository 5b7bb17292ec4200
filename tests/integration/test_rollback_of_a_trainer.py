"""After a rollback, a trainer that runs starts again by itself from that version, with nothing of a later one."""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from sqlalchemy import select

from shared.ledger import transitions
from shared.ledger.queries import count_by_state, find_trainer, ledger_status
from shared.ledger.tables import batches, experiences
from tests.support.experiences import make_experiences, record_ready
from tests.support.forms import DATABASES, FULL
from tests.support.processes import wait_for
from tests.support.trained_roots import BATCH, begin, line_of, newest, open_ledger, prepare, weights


@pytest.fixture(scope="module")
def rows(model):
    return make_experiences(model, 5 * BATCH)


def prove(root: Path, *numbers: int) -> None:
    ledger = open_ledger(root)
    with ledger.write() as connection:
        for number in numbers:
            transitions.serve_version(connection, number, by="an engine")
    ledger.close()


def roll_back(root: Path, to: int, *, again: bool = False) -> transitions.Rollback:
    ledger = open_ledger(root)
    with ledger.write() as connection:
        done = transitions.roll_back(connection, to, again=again, by="operator")
    ledger.close()
    return done


def add(root: Path, rows) -> None:
    ledger = open_ledger(root)
    record_ready(ledger, rows)
    ledger.close()


@pytest.mark.parametrize("is_running", [True, False])
def test_it_goes_on_from_the_state_of_that_version_to_the_same_bits(is_running, tmp_path, lives, model, rows):
    """Version 2 was made of the second batch. After a rollback to version 1, a copy of that batch makes it again."""
    (tmp_path / "trainer.log").touch()
    prepare(tmp_path, model, rows[: 3 * BATCH])
    again = [replace(row, msg_id=f"again-{row.msg_id}") for row in rows[BATCH : 2 * BATCH]]
    with contextlib.ExitStack() as running:
        trainer = running.enter_context(begin(lives, tmp_path))
        wait_for(lambda: "no ready rows" in trainer.output() or not trainer.alive, "version 3", 240)
        prove(tmp_path, 1, 2, 3)
        if not is_running:
            assert trainer.stop() == 0
        done = roll_back(tmp_path, 1)
        assert (done.rejected, done.trainers) == ([2, 3], {"trainer": True})
        add(tmp_path, again)
        if not is_running:
            trainer = running.enter_context(begin(lives, tmp_path))
        wait_for(lambda: newest(tmp_path) == 4 or not trainer.alive, "version 4", 240)
        assert trainer.stop() == 0
    assert line_of(tmp_path) == [0, 1, 4]
    assert weights(tmp_path, 4) == weights(tmp_path, 2) != weights(tmp_path, 1)
    states = sorted(folder.name for folder in (tmp_path / "trainer/trainer").glob("state-*"))
    assert states == ["state-000001", "state-000004"], "states of rejected versions are deleted"
    said = trainer.output()
    assert "Traceback" not in said and said.count("gone back to version 1") == is_running


def test_with_again_it_makes_the_same_versions_once_more(tmp_path, lives, model, rows):
    (tmp_path / "trainer.log").touch()
    prepare(tmp_path, model, rows[: 3 * BATCH])
    with begin(lives, tmp_path) as trainer:
        wait_for(lambda: "no ready rows" in trainer.output() or not trainer.alive, "version 3", 240)
        prove(tmp_path, 1, 2, 3)
        assert roll_back(tmp_path, 1, again=True).rows == 2 * BATCH
        wait_for(lambda: newest(tmp_path) == 5 or not trainer.alive, "version 5", 240)
        assert trainer.stop() == 0
    assert line_of(tmp_path) == [0, 1, 4, 5]
    assert [weights(tmp_path, version) for version in (4, 5)] == [weights(tmp_path, version) for version in (2, 3)]


def test_without_a_state_of_that_version_it_goes_on_from_its_weights(tmp_path, lives, model, rows):
    """The base has none. The first batch makes version 1 of it once more."""
    (tmp_path / "trainer.log").touch()
    prepare(tmp_path, model, rows[: 2 * BATCH])
    with begin(lives, tmp_path) as trainer:
        wait_for(lambda: "no ready rows" in trainer.output() or not trainer.alive, "version 2", 240)
        assert roll_back(tmp_path, 0).trainers == {"trainer": False}
        add(tmp_path, [replace(row, msg_id=f"again-{row.msg_id}") for row in rows[:BATCH]])
        wait_for(lambda: newest(tmp_path) == 3 or not trainer.alive, "version 3", 240)
        assert trainer.stop() == 0
    assert line_of(tmp_path) == [0, 3]
    assert weights(tmp_path, 3) == weights(tmp_path, 1)
    assert "Traceback" not in trainer.output()


def test_a_trainer_that_waits_for_rows_trains_again_on_those_that_no_state_contains(tmp_path, lives, model, rows):
    (tmp_path / "trainer.log").touch()
    prepare(tmp_path, model, rows[: 3 * BATCH], save_every=2)
    with begin(lives, tmp_path) as trainer:
        wait_for(lambda: "no ready rows" in trainer.output() or not trainer.alive, "version 3", 240)
        prove(tmp_path, 1, 2)
        assert roll_back(tmp_path, 2).trainers == {"trainer": True}
        wait_for(lambda: newest(tmp_path) == 4 or not trainer.alive, "version 4", 60)
        assert trainer.stop() == 0
    assert line_of(tmp_path) == [0, 1, 2, 4]
    assert weights(tmp_path, 4) == weights(tmp_path, 3)


def test_a_trainer_whose_last_version_an_engine_rejected_goes_on_from_its_state(tmp_path, lives, model, rows):
    """Nobody has rolled back: the folder may have been damaged, and the weights in the state are sound."""
    (tmp_path / "trainer.log").touch()
    prepare(tmp_path, model, rows[: 2 * BATCH])
    with begin(lives, tmp_path) as trainer:
        wait_for(lambda: "no ready rows" in trainer.output() or not trainer.alive, "version 2", 240)
        assert trainer.stop() == 0
    ledger = open_ledger(tmp_path)
    with ledger.write() as connection:
        assert transitions.reject_version(connection, 2, "its folder is damaged", by="an engine")
    ledger.close()
    add(tmp_path, rows[2 * BATCH : 3 * BATCH])
    with begin(lives, tmp_path) as trainer:
        wait_for(lambda: newest(tmp_path) == 3 or not trainer.alive, "version 3", 60)
        assert trainer.stop() == 0
    assert "starting again" not in trainer.output()


@pytest.mark.parametrize(
    ("save_every", "database_url"),
    list(product((1, 2), DATABASES)) if FULL else [(1, "postgresql"), (2, "sqlite")],
    indirect=["database_url"],
)
def test_rolled_back_at_random_moments_no_row_is_lost_and_no_version_has_a_rejected_parent(
    save_every, tmp_path, lives, model, rows, database_url
):
    (tmp_path / "trainer.log").touch()
    prepare(tmp_path, model, rows, database_url, save_every=save_every)
    draw, starts = random.Random(7), 1
    with begin(lives, tmp_path) as trainer:

        def is_idle() -> bool:
            return not trainer.alive or (trainer.output().count("at work") == starts and is_all_contained(tmp_path))

        for _ in range(3):
            line = line_of(tmp_path)
            wait_for(lambda line=line: len(line_of(tmp_path)) > len(line) or is_idle(), "progress", 240, 0.005)
            time.sleep(draw.random() * 0.1)  # a random moment is what is wanted
            saved, line = saved_version(tmp_path), line_of(tmp_path)
            to = min(line[-2] if len(line) > 1 else 0, saved)
            prove(tmp_path, *(version for version in line if version <= to))  # one that never serves is SKIPPED
            starts += len(roll_back(tmp_path, to).trainers)
        wait_for(is_idle, "the end", 240)
        assert trainer.stop() == 0
    line_of(tmp_path)
    assert "Traceback" not in trainer.output()
    ledger = open_ledger(tmp_path)
    with ledger.read() as connection:
        counts = count_by_state(connection)
        contained = connection.execute(select(experiences.c.consumed_version)).scalars().all()
        held = connection.execute(select(batches.c.id).where(batches.c.state == "LEASED")).all()
        deaths = connection.execute(select(experiences.c.deaths).where(experiences.c.deaths > 0)).all()
    ledger.close()
    assert counts["CONSUMED"] == len(rows) and None not in contained
    assert not held and not deaths


def saved_version(root: Path) -> int:
    ledger = open_ledger(root)
    with ledger.read() as connection:
        row = find_trainer(connection, "trainer")
    ledger.close()
    return row.version if row else 0


def is_all_contained(root: Path) -> bool:
    """Whether versions contain all rows; a saved state may not contain the last ones yet."""
    ledger = open_ledger(root)
    with ledger.read() as connection:
        status = ledger_status(connection)
    ledger.close()
    waiting = sum(trainer["rows_waiting_for_state"] for trainer in status["trainers"])
    return not status["rows"]["READY"] and status["rows"]["LEASED"] == waiting
