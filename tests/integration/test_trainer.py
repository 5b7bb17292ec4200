"""The trainer as a real process on a real ledger: READY rows become versions, exactly once, whatever kills it."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest
from sqlalchemy import select

from shared.ledger.queries import count_by_state, find_trainer, list_versions
from shared.ledger.tables import batches, experiences, lineage
from shared.versions import verify_version
from tests.support.experiences import make_experiences
from tests.support.forms import FULL
from tests.support.models import make_tiny_model
from tests.support.processes import wait_for
from tests.support.trained_roots import (
    BATCH,
    LAST,
    ROWS,
    begin,
    finish,
    line_of,
    newest,
    open_ledger,
    prepare,
    weights,
)


@pytest.fixture(scope="module")
def rows(model):
    return make_experiences(model, ROWS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, lives, model, rows) -> Path:
    """The root of a trainer that nobody killed."""
    root = tmp_path_factory.mktemp("undisturbed")
    prepare(root, model, rows)
    finish(lives, root)
    return root


def test_ready_rows_become_versions_that_verify_and_the_rows_name_them(undisturbed):
    ledger = open_ledger(undisturbed)
    with ledger.read() as connection:
        versions = list_versions(connection)
        consumed = connection.execute(select(experiences.c.consumed_version).order_by(experiences.c.id)).scalars().all()
        all_versions = connection.execute(select(lineage).order_by(lineage.c.experience_id)).all()
        trainer = find_trainer(connection, "trainer")
    ledger.close()
    assert [(v.version, v.parent, v.step) for v in versions] == [
        (0, None, 0),
        *((n, n - 1, n) for n in range(1, LAST + 1)),
    ]
    assert consumed == [1 + index // BATCH for index in range(ROWS)]  # oldest first
    assert [tuple(row) for row in all_versions] == [(index, v, True) for index, v in enumerate(consumed, start=1)]
    for version in versions:
        assert verify_version(undisturbed / version.path).version == version.version
    assert trainer is not None and not trainer.alive
    assert trainer.stats["staleness_versions"] == LAST - 1, "version 0 sampled all rows, and the last update had LAST-1"
    assert "logprob_gap_max" not in trainer.stats, "no row is of the version that the last update began with"


def test_an_update_moves_the_weights(undisturbed):
    assert len({weights(undisturbed, version) for version in range(LAST + 1)}) == LAST + 1


def test_it_waits_for_rows_without_end_and_says_so_once(undisturbed):
    lines = (undisturbed / "trainer.log").read_text().splitlines()
    assert sum("no ready rows" in line for line in lines) == 1
    assert not any("Traceback" in line for line in lines)


FAULTS = [
    "before Learner.write_version",
    "after Learner.write_version",
    "after StateStore.save",
    "before transitions.publish",
    "after transitions.publish",
    "after Trainer._make_official",
    "before StateStore.clean",
]


def check_same_line(root: Path, undisturbed: Path) -> None:
    """Every row trained once, and the very bits of the undisturbed run."""
    ledger = open_ledger(root)
    with ledger.read() as connection:
        counts = count_by_state(connection)
        consumed = connection.execute(select(experiences.c.consumed_version).order_by(experiences.c.id)).scalars().all()
        official = connection.execute(select(batches.c.state).where(batches.c.state == "CONSUMED")).all()
    ledger.close()
    assert counts["CONSUMED"] == ROWS
    assert consumed == [1 + index // BATCH for index in range(ROWS)]
    assert len(official) == LAST
    for version in range(LAST + 1):
        assert weights(root, version) == weights(undisturbed, version), f"version {version} differs"


@pytest.mark.parametrize("faults", [[fault] for fault in FAULTS] if FULL else [FAULTS], ids=", ".join)
def test_killed_between_two_steps_of_publishing_it_goes_on_to_the_same_bits(
    faults, tmp_path, lives, model, rows, undisturbed
):
    """Killed by the first fault when version 1 is saved, and by each other one in the life after that."""
    prepare(tmp_path, model, rows)
    for number, fault in enumerate(faults):
        with begin(lives, tmp_path, FAULT=fault, FAULT_CALL="1" if number else "2") as trainer:
            assert trainer.wait(240) == -9, fault
    finish(lives, tmp_path)
    check_same_line(tmp_path, undisturbed)


@pytest.mark.skipif(not FULL, reason="in the long form")
def test_killed_at_random_moments_it_goes_on_to_the_same_bits(tmp_path, lives, model, rows, undisturbed, database_url):
    prepare(tmp_path, model, rows, database_url)
    draw = random.Random(7)
    for _ in range(5):
        with begin(lives, tmp_path):
            at = newest(tmp_path)
            wait_for(lambda at=at: newest(tmp_path) > at or newest(tmp_path) == LAST, "progress", 240, 0.005)
            time.sleep(draw.random() * 0.1)  # a random moment is what is wanted
    finish(lives, tmp_path)
    check_same_line(tmp_path, undisturbed)


@pytest.mark.parametrize("publish_every", [1, 2])
def test_after_updates_that_fail_it_goes_on_to_the_same_bits(publish_every, tmp_path, lives, model, rows, undisturbed):
    """The first one too, when nothing is saved yet. With two updates to a version the one before is done again."""
    prepare(tmp_path, model, rows, publish_every=publish_every)
    log = tmp_path / "trainer.log"
    log.touch()
    with begin(lives, tmp_path, FAIL_UPDATES="1,5") as trainer:
        wait_for(lambda: "no ready rows" in log.read_text() or not trainer.alive, "the end", 240)
        last = newest(tmp_path)
        assert trainer.stop() == 0
    assert last == LAST // publish_every
    if publish_every == 1:
        check_same_line(tmp_path, undisturbed)
    else:
        assert weights(tmp_path, last) == weights(undisturbed, last * publish_every)


def test_a_disk_that_fills_up_while_a_version_is_written_makes_the_trainer_wait_and_go_on_to_the_same_bits(
    tmp_path, lives, model, rows, undisturbed
):
    prepare(tmp_path, model, rows)
    with begin(lives, tmp_path, FULL_DISK='{"version": 2, "state": 2}') as trainer:
        wait_for(lambda: newest(tmp_path) == LAST or not trainer.alive, "the last version", 240)
        assert trainer.stop() == 0
    check_same_line(tmp_path, undisturbed)
    said = (tmp_path / "trainer.log").read_text()
    assert said.count("not published: the disk is full") == 4
    assert "No space left on device" in said and "Traceback" not in said
    ledger = open_ledger(tmp_path)
    with ledger.read() as connection:
        assert find_trainer(connection, "trainer").trouble is None
    ledger.close()


WITH_UNSAVED_VERSIONS = [
    ("after transitions.publish_ahead", 1),  # nothing is saved yet
    ("after StateStore.save", 1),
    ("before transitions.publish_ahead", 2),
    ("record_state committed", 1),  # of the orderly end
]
IN_FULL = [
    ("before StateStore.save", 1),
    ("after transitions.publish", 1),
    ("after transitions.publish_ahead", 2),
]


@pytest.mark.parametrize(("fault", "call"), WITH_UNSAVED_VERSIONS + FULL * IN_FULL)
def test_versions_between_two_saved_states_are_withdrawn_after_a_crash_and_made_again(
    fault, call, tmp_path, lives, model, rows, undisturbed
):
    prepare(tmp_path, model, rows, save_every=2)
    with begin(lives, tmp_path, FAULT=fault, FAULT_CALL=f"{call}") as trainer:
        wait_for(lambda: len(line_of(tmp_path)) > LAST or not trainer.alive, "an end", 240)
        assert (trainer.stop() if trainer.alive else trainer.wait(240)) == -9
    with begin(lives, tmp_path) as trainer:
        wait_for(lambda: len(line_of(tmp_path)) > LAST or not trainer.alive, "the last version", 240)
        wait_for(lambda: (tmp_path / "trainer.log").read_text().count("at work") == 2, "the second start", 240)
        assert trainer.stop() == 0
    line = line_of(tmp_path)
    for number, version in enumerate(line):
        assert weights(tmp_path, version) == weights(undisturbed, number), f"version {version} differs"
    ledger = open_ledger(tmp_path)
    with ledger.read() as connection:
        consumed = connection.execute(select(experiences.c.consumed_version).order_by(experiences.c.id)).scalars().all()
        trainer_row = find_trainer(connection, "trainer")
    ledger.close()
    assert consumed == [version for version in line[1:] for _ in range(BATCH)]
    assert trainer_row.version == line[-1], "an orderly end saves what no state contains yet"


def test_a_failed_update_withdraws_what_no_saved_state_contains(tmp_path, lives, model, rows, undisturbed):
    prepare(tmp_path, model, rows, save_every=3)
    with begin(lives, tmp_path, FAIL_UPDATES="3") as trainer:
        wait_for(lambda: len(line_of(tmp_path)) > LAST or not trainer.alive, "the last version", 240)
        assert trainer.stop() == 0
    line = line_of(tmp_path)
    assert line == [0, 3, 4, 5, 6, 7], "versions 1 and 2 were withdrawn"
    assert all(weights(tmp_path, version) == weights(undisturbed, n) for n, version in enumerate(line))


def test_a_harness_that_marks_rows_consumed_before_the_state_is_saved_is_found_out(
    tmp_path, lives, model, rows, undisturbed
):
    """The check itself, checked: with the order turned round on purpose, it must fail."""
    prepare(tmp_path, model, rows)
    environ = {"SABOTAGE": "consumed_before_saved", "FAULT": "before StateStore.save", "FAULT_CALL": "2"}
    with begin(lives, tmp_path, **environ) as trainer:
        assert trainer.wait(240) == -9
    with begin(lives, tmp_path) as trainer:
        wait_for(lambda: newest(tmp_path) == LAST or not trainer.alive, "an end", 240)
    with pytest.raises(AssertionError):
        check_same_line(tmp_path, undisturbed)


def test_two_trainers_of_one_name_do_not_run_on_one_root(tmp_path, lives, model):
    prepare(tmp_path, model)
    (tmp_path / "trainer.log").touch()
    with begin(lives, tmp_path) as first:
        wait_for(lambda: "at work" in first.output(), "the first trainer", 240)
        second = lives.begin(["trainer", "-c", str(tmp_path / "flywheel.yaml")], tmp_path / "second.log")
        assert second.wait(240) == 1
        lines = second.output().strip().splitlines()
        assert "a trainer named 'trainer' already runs on this root_dir" in lines[-1]
        assert "Traceback" not in second.output()


def test_another_model_in_the_same_root_is_refused(undisturbed, tmp_path, lives):
    root = tmp_path / "root"
    shutil.copytree(undisturbed, root)
    other = make_tiny_model(tmp_path / "other", seed=5)
    prepare(root, other)
    with begin(lives, root) as trainer:
        assert trainer.wait(240) == 2
        assert "give the new model a root_dir of its own" in trainer.output().splitlines()[-1]
