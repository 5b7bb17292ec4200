"""The trainer as a real process on a real ledger: READY rows become versions, exactly once, whatever kills it."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from shared.config import load_config
from shared.ledger.connect import Ledger
from shared.ledger.queries import count_by_state, find_trainer, list_versions
from shared.ledger.tables import batches, experiences
from shared.versions import verify_version
from tests.experiences import make_experiences, record_ready, trainer_config
from tests.lives import Life, Lives
from tests.models import make_tiny_model
from tests.processes import Process, wait_for, write_config

ROWS, BATCH = 40, 8
LAST = ROWS // BATCH


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def rows(model):
    return make_experiences(model, ROWS)


@pytest.fixture(scope="module")
def lives(tmp_path_factory) -> Iterator[Lives]:
    lives = Lives(tmp_path_factory.mktemp("lives") / "log")
    yield lives
    lives.stop()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, model, rows) -> Path:
    """The root of a trainer that nobody killed."""
    root = tmp_path_factory.mktemp("undisturbed")
    prepare(root, model, rows)
    with start(root) as trainer:
        wait_for(lambda: newest(root) == LAST, "the last version", 60)
        assert trainer.stop() == 0
    return root


def prepare(root: Path, model: Path, rows=(), database_url: str | None = None) -> None:
    """A root with rows that are ready."""
    config = trainer_config(root, model, batch_size=BATCH)
    write_config(config.model_copy(update={"database_url": database_url}), root / "flywheel.yaml")
    ledger = open_ledger(root)
    record_ready(ledger, rows)
    ledger.close()


def start(root: Path) -> Process:
    return Process(["trainer", "-c", str(root / "flywheel.yaml")], root / "trainer.log")


def begin(lives: Lives, root: Path, **environ: str) -> Life:
    """As `start`, without the seconds it takes to import everything, and with faults."""
    return lives.begin(["trainer", "-c", str(root / "flywheel.yaml")], root / "trainer.log", **environ)


def newest(root: Path) -> int:
    ledger = open_ledger(root)
    with ledger.read() as connection:
        version = max((row.version for row in list_versions(connection)), default=-1)
    ledger.close()
    return version


def open_ledger(root: Path) -> Ledger:
    return Ledger.open(load_config(root / "flywheel.yaml").ledger_url)


def weights(root: Path, version: int) -> bytes:
    return (root / f"versions/v{version:06d}/model.safetensors").read_bytes()


def test_ready_rows_become_versions_that_verify_and_the_rows_name_them(undisturbed):
    ledger = open_ledger(undisturbed)
    with ledger.read() as connection:
        versions = list_versions(connection)
        consumed = connection.execute(select(experiences.c.consumed_version).order_by(experiences.c.id)).scalars().all()
        trainer = find_trainer(connection, "trainer")
    ledger.close()
    assert [(v.version, v.parent, v.step) for v in versions] == [
        (0, None, 0),
        *((n, n - 1, n) for n in range(1, LAST + 1)),
    ]
    assert consumed == [1 + index // BATCH for index in range(ROWS)]  # oldest first
    for version in versions:
        assert verify_version(undisturbed / version.path).version == version.version
    assert trainer is not None and not trainer.alive
    assert trainer.stats["logprob_gap_max"] == 0.0 or trainer.stats["staleness_versions"] > 0


def test_an_update_moves_the_weights(undisturbed):
    assert len({weights(undisturbed, version) for version in range(LAST + 1)}) == LAST + 1


def test_it_waits_for_rows_without_end_and_says_so_once(undisturbed):
    lines = (undisturbed / "trainer.log").read_text().splitlines()
    assert sum("no ready rows" in line for line in lines) == 1
    assert not any("Traceback" in line for line in lines)


FAULTS = [
    "before write_full_version",
    "after write_full_version",
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


@pytest.mark.parametrize("fault", FAULTS)
def test_killed_between_two_steps_of_publishing_it_goes_on_to_the_same_bits(
    fault, tmp_path, lives, model, rows, undisturbed
):
    prepare(tmp_path, model, rows)
    with begin(lives, tmp_path, FAULT=fault, FAULT_CALL="2") as trainer:
        assert trainer.wait(60) == -9
    finish(lives, tmp_path)
    check_same_line(tmp_path, undisturbed)


def test_killed_at_random_moments_it_goes_on_to_the_same_bits(tmp_path, lives, model, rows, undisturbed, database_url):
    prepare(tmp_path, model, rows, database_url)
    draw = random.Random(7)
    for _ in range(5):
        with begin(lives, tmp_path):
            at = newest(tmp_path)
            wait_for(lambda at=at: newest(tmp_path) > at or newest(tmp_path) == LAST, "progress", 60, 0.005)
            time.sleep(draw.random() * 0.1)  # a random moment is what is wanted
    finish(lives, tmp_path)
    check_same_line(tmp_path, undisturbed)


def finish(lives: Lives, root: Path) -> None:
    """A life that nobody disturbs, up to the last version, and on until it has nothing to do."""
    log = root / "trainer.log"
    before = log.stat().st_size
    with begin(lives, root) as trainer:
        wait_for(lambda: b"no ready rows" in log.read_bytes()[before:] or not trainer.alive, "the last version", 60)
        assert newest(root) == LAST
        assert trainer.stop() == 0


def test_a_harness_that_marks_rows_consumed_before_the_state_is_saved_is_found_out(
    tmp_path, lives, model, rows, undisturbed
):
    """The check itself, checked: with the order turned round on purpose, it must fail."""
    prepare(tmp_path, model, rows)
    environ = {"SABOTAGE": "consumed_before_saved", "FAULT": "before StateStore.save", "FAULT_CALL": "2"}
    with begin(lives, tmp_path, **environ) as trainer:
        assert trainer.wait(60) == -9
    with begin(lives, tmp_path) as trainer:
        wait_for(lambda: newest(tmp_path) == LAST or not trainer.alive, "an end", 60)
    with pytest.raises(AssertionError):
        check_same_line(tmp_path, undisturbed)


def test_two_trainers_of_one_name_do_not_run_on_one_root(tmp_path, model):
    prepare(tmp_path, model)
    with start(tmp_path) as first:
        wait_for(lambda: "at work" in first.output(), "the first trainer", 60)
        second = Process(["trainer", "-c", str(tmp_path / "flywheel.yaml")], tmp_path / "second.log")
        assert second.wait(60) == 1
        lines = second.output().strip().splitlines()
        assert "a trainer named 'trainer' runs on this root_dir" in lines[-1]
        assert "Traceback" not in second.output()


def test_another_model_in_the_same_root_is_refused(undisturbed, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(undisturbed, root)
    other = make_tiny_model(tmp_path / "other", seed=5)
    prepare(root, other)
    with start(root) as trainer:
        assert trainer.wait(60) == 1
        assert "give the new model a root_dir of its own" in trainer.output().splitlines()[-1]
