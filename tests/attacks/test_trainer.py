"""Attacks on the trainer, and slips of those who run it: real processes on real ledgers."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from shared.config import load_config
from shared.experience import Experience, Tokens
from shared.ledger.connect import Ledger
from shared.ledger.queries import count_by_state, find_trainer, list_versions, quarantined
from shared.ledger.tables import experiences, trainers
from shared.reward import Signal
from tests.support.experiences import make_experiences, record_ready, trainer_config
from tests.support.forms import FULL
from tests.support.lessons import commit, say
from tests.support.lives import Life, Lives
from tests.support.processes import Process, wait_for, write_config

BATCH = 8


@pytest.fixture(scope="module")
def rows(model):
    return make_experiences(model, 3 * BATCH)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, lives, model, rows) -> Path:
    """The root of a trainer that published three versions and stopped."""
    root = tmp_path_factory.mktemp("trained")
    prepare(root, model, rows)
    with begin(lives, root) as trainer:
        wait_for(lambda: newest(root) == 3, "the last version", 240)
        assert trainer.stop() == 0
    return root


def prepare(root: Path, model: Path, rows=(), **trainer: object) -> None:
    """A root with rows that are ready."""
    write_config(trainer_config(root, model, **{"batch_size": BATCH, **trainer}), root / "flywheel.yaml")
    with_ledger(root, lambda ledger: record_ready(ledger, rows))


def begin(lives: Lives, root: Path, **environ: str) -> Life:
    return lives.begin(["trainer", "-c", str(root / "flywheel.yaml")], root / "trainer.log", **environ)


def with_ledger(root: Path, work):
    ledger = Ledger.open(load_config(root / "flywheel.yaml", {}).ledger_url)
    try:
        return work(ledger)
    finally:
        ledger.close()


def newest(root: Path) -> int:
    def read(ledger: Ledger) -> int:
        with ledger.read() as connection:
            return max((row.version for row in list_versions(connection) if row.may_serve), default=-1)

    return with_ledger(root, read)


def counts(root: Path) -> dict[str, int]:
    def read(ledger: Ledger) -> dict[str, int]:
        with ledger.read() as connection:
            return count_by_state(connection)

    return with_ledger(root, read)


def said(root: Path) -> str:
    log = root / "trainer.log"
    return log.read_text() if log.exists() else ""


def last_line(root: Path) -> str:
    """What the trainer said last. It never ends with a traceback."""
    output = said(root)
    assert "Traceback" not in output
    return output.strip().splitlines()[-1]


def learned(root: Path) -> dict[str, bytes]:
    """Every file under versions/ and of the saved states, but for locks."""
    files = [file for name in ("versions", "trainer") for file in (root / name).rglob("*") if file.is_file()]
    return {str(file.relative_to(root)): file.read_bytes() for file in files if "lock" not in file.name}


def copy_of(trained: Path, root: Path) -> Path:
    """A copy of the root, with a configuration that names it."""
    shutil.copytree(trained, root)
    config = load_config(root / "flywheel.yaml", {}).model_copy(update={"root_dir": str(root)})
    write_config(config, root / "flywheel.yaml")
    (root / "trainer.log").unlink()
    return root


def test_a_trainer_on_the_wrong_ledger_deletes_nothing_and_names_both_sides(tmp_path, lives, trained):
    root = copy_of(trained, tmp_path / "root")
    before = learned(root)
    wrong = tmp_path / "wrong.sqlite3"
    with begin(lives, root, FLYWHEEL_DATABASE_URL=f"sqlite:///{wrong}") as trainer:
        assert trainer.wait(240) == 1
    assert str(wrong) in last_line(root) and str(root) in last_line(root) and "database_url" in last_line(root)
    assert learned(root) == before
    with begin(lives, root) as trainer:
        wait_for(lambda: "at work" in said(root), "a trainer that goes on", 240)
        assert trainer.stop() == 0


def test_a_trainer_on_an_older_backup_of_the_ledger_deletes_nothing(tmp_path, lives, model, rows, trained):
    root = copy_of(trained, tmp_path / "root")
    for name in ("ledger.sqlite3", "ledger.sqlite3-wal", "ledger.sqlite3-shm"):
        (root / name).unlink(missing_ok=True)
    older = tmp_path / "older"
    older.mkdir()
    prepare(older, model, rows[: 2 * BATCH])
    with begin(lives, older) as trainer:
        wait_for(lambda: newest(older) == 2, "the second version", 240)
        assert trainer.stop() == 0
    shutil.copy(older / "ledger.sqlite3", root / "ledger.sqlite3")
    before = learned(root)
    with begin(lives, root) as trainer:
        assert trainer.wait(240) == 1
    assert "v000003" in last_line(root) and "ledger.sqlite3" in last_line(root)
    assert learned(root) == before


def test_saved_states_that_no_row_names_are_not_deleted(tmp_path, lives, trained):
    root = copy_of(trained, tmp_path / "root")

    def forget(ledger: Ledger) -> None:
        with ledger.write() as connection:
            connection.execute(trainers.delete())

    with_ledger(root, forget)
    before = learned(root)
    with begin(lives, root) as trainer:
        assert trainer.wait(240) == 1
    assert "state-000003" in last_line(root)
    assert learned(root) == before


def spoil(root: Path, msg_id: str, **columns: object) -> None:
    def work(ledger: Ledger) -> None:
        with ledger.write() as connection:
            connection.execute(experiences.update().where(experiences.c.msg_id == msg_id).values(**columns))

    with_ledger(root, work)


def trained_rows(root: Path) -> int:
    return counts(root)["CONSUMED"]


def reasons(root: Path) -> dict[str, int]:
    def read(ledger: Ledger) -> dict[str, int]:
        with ledger.read() as connection:
            return quarantined(connection)

    return with_ledger(root, read)


def poisoned(kind: str, row: Experience) -> Experience:
    """The row with what no update survives, or what never gets as far."""
    if kind in ("memory", "length"):
        long = 5_000
        arrays = np.full(long, 5, np.int32), np.full(long, 6, np.int32), np.full(long, -1.0, np.float32)
        return replace(row, tokens=Tokens(*arrays))
    if kind == "vocabulary":
        return replace(row, tokens=replace(row.tokens, prompt_ids=np.append(row.tokens.prompt_ids, 70_000)))
    return row


REASONS = {
    "logits": "not finite",
    "memory": "allocate|out of memory",
    "vocabulary": "model's vocabulary",
    "length": "more tokens than the 256 that are trained on",
}
SHORT = [("logits", 2), ("memory", 1), ("vocabulary", 1), ("length", 1)]


@pytest.mark.parametrize(("kind", "ranks"), list(product(REASONS, (1, 2))) if FULL else SHORT)
def test_one_bad_row_is_quarantined_and_all_others_are_trained(kind, ranks, tmp_path, lives, model):
    many, bad = (64, 37) if FULL else (3 * BATCH, BATCH + 5)  # with a batch before it and one after it
    rows = make_experiences(model, many)
    rows[bad] = poisoned(kind, rows[bad])
    small: dict[str, object] = {"breaker": {"kl_of_update": None, "change_of_update": None}}  # few rows move it far
    if kind == "memory":
        small["max_trajectory_tokens"] = 10_000  # or the row would not get that far
    prepare(tmp_path, model, rows, ranks=ranks, **small)
    if kind == "logits":
        spoil(tmp_path, rows[bad].msg_id, min_p=2.0)  # which no engine takes: it cuts off every token
    limit = {"LIMIT_MEMORY": str(140 * 1024**2)} if kind == "memory" else {}
    starts = 0
    while trained_rows(tmp_path) < many - 1:  # a rank that fails alone ends its job; a supervisor starts it again
        starts += 1
        with begin(lives, tmp_path, **limit) as trainer:
            wait_for(lambda: trained_rows(tmp_path) == many - 1 or not trainer.alive, "the rest", 240)
            status = trainer.stop()
        assert status == 0 or (kind == "memory" and ranks == 2 and starts < 20)
    assert counts(tmp_path)["CONSUMED"] == many - 1 and counts(tmp_path)["DISCARDED"] == 1
    ((found, count),) = reasons(tmp_path).items()
    assert count == 1 and re.search(REASONS[kind], found)
    assert "Traceback" not in said(tmp_path)


def correct(ledger: Ledger, rows: list[Experience]) -> None:
    """Say of each row what would have been the right answer."""
    for row in rows:
        say(ledger, row.msg_id, Signal("correction", text="w3 w4"))
    commit(ledger)


@pytest.mark.parametrize(("algorithm", "ranks"), [("ppo", 1), ("sft", 1), *FULL * [("dpo", 2)]])
def test_when_every_update_fails_no_row_is_blamed(algorithm, ranks, tmp_path, lives, model, rows):
    """A learning rate with a slip of the pen makes the weights infinite, whatever the rows are."""
    prepare(tmp_path, model, rows[:BATCH], algorithm=algorithm, ranks=ranks, learning_rate=1e30)
    with_ledger(tmp_path, lambda ledger: correct(ledger, rows[:BATCH]))
    with begin(lives, tmp_path) as trainer:
        assert trainer.wait(240) == 1
    assert re.search("updates fail whatever the rows are .* lower trainer.learning_rate", said(tmp_path))
    assert "Traceback" not in said(tmp_path)
    assert counts(tmp_path)["DISCARDED"] == 0


def test_a_saved_state_that_someone_changed_is_not_loaded(tmp_path, lives, trained):
    root = copy_of(trained, tmp_path / "root")
    weights = root / "trainer/trainer/state-000003/master.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with begin(lives, root) as trainer:
        assert trainer.wait(240) == 1
    assert "SHA-256" in last_line(root)


def test_a_disk_below_its_floor_stops_publishing_and_the_trainer_goes_on_when_there_is_room(
    tmp_path, lives, model, rows
):
    prepare(tmp_path, model, rows[:BATCH])
    room = tmp_path / "room"
    with begin(lives, tmp_path, FREE_BYTES_WITHOUT=f"{room}:500000000") as trainer:
        wait_for(lambda: "not publishing" in said(tmp_path), "a warning", 240)
        trouble = wait_for(lambda: with_ledger(tmp_path, trouble_of), "the trouble in the status", 60)
        assert "min_free_disk_gb" in trouble
        assert counts(tmp_path)["LEASED"] == BATCH and newest(tmp_path) == 0
        room.touch()
        wait_for(lambda: newest(tmp_path) == 1, "a version", 240)
        assert trainer.stop() == 0
    assert said(tmp_path).count("not publishing") == 1
    assert with_ledger(tmp_path, trouble_of) is None


def trouble_of(ledger: Ledger) -> str | None:
    with ledger.read() as connection:
        return find_trainer(connection, "trainer").trouble


@pytest.mark.parametrize("limit", [300_000, 500_000], ids=["version", "state"])
def test_a_save_that_fails_half_way_leaves_nothing_and_one_clear_line(limit, tmp_path, lives, trained, rows):
    """The kernel refuses to write beyond a size: first the version's weights, then the state's."""
    root = copy_of(trained, tmp_path / "root")
    again = [replace(row, msg_id=f"again-{row.msg_id}") for row in rows[:BATCH]]
    with_ledger(root, lambda ledger: record_ready(ledger, again))
    before = learned(root)
    with begin(lives, root, LIMIT_FILE=str(limit)) as trainer:
        assert trainer.wait(240) == 1
    assert "cannot be written" in last_line(root) and "free space" in last_line(root)
    after = learned(root)
    assert {name: after[name] for name in before} == before
    assert not [name for name in after if "tmp" in name or "state-000004" in name]
    with begin(lives, root) as trainer:
        wait_for(lambda: newest(root) == 4, "the version after it", 240)
        assert trainer.stop() == 0


def test_a_trainer_leaves_nothing_in_the_temporary_folder(tmp_path, model):
    """A process of its own, because its imports may leave files as well."""
    prepare(tmp_path, model)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    arguments = ["trainer", "-c", str(tmp_path / "flywheel.yaml")]
    with Process(arguments, tmp_path / "trainer.log", TMPDIR=str(temporary)) as trainer:
        wait_for(lambda: "at work" in said(tmp_path), "a trainer", 240)
        assert not list(temporary.iterdir())
        assert trainer.stop() == 0
    assert not list(temporary.iterdir())
