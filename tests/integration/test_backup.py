"""`flywheel backup`: one moment of ledger, versions and states, while all that changes them goes on."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import delete, func, insert, select, update

from services import backup
from shared.errors import ConfigError, StartupError
from shared.ledger.connect import Ledger
from shared.ledger.queries import count_by_state
from shared.ledger.tables import experiences, trainer_states, trainers, versions
from tests.support.experiences import make_experiences
from tests.support.forms import FULL
from tests.support.processes import run_here, wait_for, write_config
from tests.support.samples import record
from tests.support.servers import RunningExplorer, make_config, publish, served, wait_until
from tests.support.trained_roots import LAST, ROWS, begin, finish, newest, open_ledger, prepare, weights

pytestmark = pytest.mark.usefixtures("patient_health")
STATE = "trainer/one/state-000002"


def copied(root: Path) -> set[str]:
    """The versions and states in a backup."""
    found = [*root.glob("versions/*"), *root.glob("trainer/*/state-*")]
    return {str(one.relative_to(root)) for one in found}


def state(explorer, path: str = STATE) -> None:
    """A trainer's row, and the state that it names."""
    folder = explorer.config.root / path
    folder.mkdir(parents=True)
    (folder / "master.safetensors").write_bytes(b"state")
    row = {"name": "one", "step": 2, "version": 2, "state_path": path, "heartbeat_at": 0.0}
    with explorer.ledger.write() as connection:
        connection.execute(insert(trainers), row)


@pytest.fixture
def serving(explorer):
    """An explorer that serves version 2, with a recorded chat and a trainer's state."""
    for version in (1, 2):
        publish(explorer, version, -1.0 - version)
        wait_until(lambda version=version: served(explorer) == str(version))
    state(explorer)
    return explorer


def back_up(explorer, to: Path) -> int:
    return run_here(explorer.config, "backup", "--to", str(to))


def give_up(explorer, version: int) -> None:
    """As the janitor deletes a version."""
    with explorer.ledger.write() as connection:
        connection.execute(update(versions).where(versions.c.version == version).values(deleted_at=1.0))
    shutil.rmtree(explorer.config.root / f"versions/v{version:06d}")


@pytest.mark.parametrize("at", [1, 3] if FULL else [3])
def test_a_trainer_goes_on_to_the_same_bits_from_a_backup_made_while_it_trained(at, tmp_path, lives, model):
    root, to = tmp_path / "root", tmp_path / "backup"
    root.mkdir()
    prepare(root, model, make_experiences(model, ROWS))
    with begin(lives, root) as trainer:
        wait_for(lambda: newest(root) >= at, "a version", 240)
        ended = lives.begin(["backup", "-c", str(root / "flywheel.yaml"), "--to", str(to)], tmp_path / "backup.log")
        assert ended.wait(240) == 0, ended.output()
        wait_for(lambda: newest(root) == LAST or not trainer.alive, "the last version", 240)
        assert trainer.stop() == 0
    prepare(to, model)  # a configuration file
    assert newest(to) >= at and (to / "trainer/trainer/figures.jsonl").stat().st_size
    finish(lives, to)
    assert weights(to, LAST) == weights(root, LAST)
    with closing(open_ledger(to)) as ledger, ledger.read() as connection:
        assert count_by_state(connection)["CONSUMED"] == ROWS


def test_an_explorer_serves_from_a_backup_and_finds_every_row(serving, second_engine, tmp_path, capsys):
    assert back_up(serving, tmp_path / "backup") == 0
    assert "2 versions and 1 states" in " ".join(capsys.readouterr().err.split())
    with serving.ledger.read() as connection:
        rows = connection.scalar(select(func.count()).select_from(experiences))
    restored = RunningExplorer(make_config(tmp_path / "backup", [second_engine.url])).wait_ready()
    try:
        assert served(restored) == "2"
        with restored.ledger.read() as connection:
            assert connection.scalar(select(func.count()).select_from(experiences)) == rows + 1
    finally:
        restored.stop()


def test_what_is_deleted_while_it_is_copied_is_in_the_backup(serving, tmp_path, monkeypatch):
    copy = backup._copy_rows

    def delete_first(*given):
        give_up(serving, 1)
        shutil.rmtree(serving.config.root / STATE)
        return copy(*given)

    monkeypatch.setattr(backup, "_copy_rows", delete_first)
    assert back_up(serving, tmp_path / "backup") == 0
    assert copied(tmp_path / "backup") == {"versions/v000001", "versions/v000002", STATE}
    with closing(Ledger.open(f"sqlite:///{tmp_path}/backup/ledger.sqlite3")) as ledger, ledger.read() as connection:
        assert connection.scalar(select(func.count()).where(versions.c.deleted_at.is_not(None))) == 0


def test_what_is_deleted_before_it_is_linked_is_in_neither_ledger_nor_folder(serving, tmp_path, monkeypatch):
    named, asked = backup._named, []

    def delete_after(connection):
        paths = named(connection)
        if not asked:
            give_up(serving, 1)
        asked.append(paths)
        return paths

    monkeypatch.setattr(backup, "_named", delete_after)
    assert back_up(serving, tmp_path / "backup") == 0
    assert copied(tmp_path / "backup") == {"versions/v000002", STATE} and len(asked) == 2


def test_a_folder_that_somebody_removed_is_named_and_left_out(serving, tmp_path, capsys):
    with serving.ledger.write() as connection:
        lost = {"trainer": "one", "version": 1, "path": "trainer/one/state-000001", "step": 1}
        connection.execute(insert(trainer_states), lost)
    assert back_up(serving, tmp_path / "backup") == 0
    assert "state-000001 does not exist, and is not in the backup" in " ".join(capsys.readouterr().err.split())
    assert copied(tmp_path / "backup") == {"versions/v000001", "versions/v000002", STATE}


@pytest.fixture
def no_hard_links(monkeypatch):
    def refuse(*_given, **_named):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.usefixtures("no_hard_links")
def test_without_hard_links_the_folders_themselves_are_copied(serving, tmp_path, monkeypatch):
    assert back_up(serving, tmp_path / "backup") == 0
    assert copied(tmp_path / "backup") == {"versions/v000001", "versions/v000002", STATE}
    copy = backup._copy_rows

    def delete_first(*given):
        give_up(serving, 1)
        return copy(*given)

    monkeypatch.setattr(backup, "_copy_rows", delete_first)
    with pytest.raises(StartupError, match=r"v000001 was deleted while it was copied.*stop the trainers"):
        back_up(serving, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_full_disk_leaves_no_half_backup_and_no_links(serving, tmp_path, monkeypatch):
    def fill(*_given, **_named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", fill)
    with pytest.raises(StartupError, match=r"there.* cannot be written \(No space left on device\); free space there"):
        back_up(serving, tmp_path / "there/backup")
    assert list((tmp_path / "there").iterdir()) == []
    assert list(serving.config.root.rglob(".backup")) == []


def test_the_links_of_a_killed_backup_are_removed_by_the_next_one(serving, tmp_path):
    for home in ("versions", "trainer/one"):
        left = serving.config.root / home / ".backup" / "v000000"
        left.mkdir(parents=True)
        (left / "model.safetensors").write_bytes(b"")
    assert back_up(serving, tmp_path / "backup") == 0
    assert list(serving.config.root.rglob(".backup")) == []
    assert copied(tmp_path / "backup") == {"versions/v000001", "versions/v000002", STATE}


def test_two_backups_of_one_root_do_not_run_at_once(serving, tmp_path):
    with (serving.config.root / "versions/.backup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StartupError, match=r"another backup of .* runs; wait"):
            back_up(serving, tmp_path / "backup")
    assert back_up(serving, tmp_path / "backup") == 0


def test_nothing_is_written_over_a_folder(serving, tmp_path):
    with pytest.raises(ConfigError, match="is there already; name a new folder"):
        back_up(serving, tmp_path)


def test_a_folder_that_is_a_mount_point_is_refused_before_anything_is_copied(serving, tmp_path, monkeypatch):
    (tmp_path / "volume").mkdir()

    def rename(folder: Path, to: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(folder))

    monkeypatch.setattr(Path, "rename", rename)  # as of a mount point
    with pytest.raises(ConfigError, match=r"volume is a mount point; name a new folder in it, such as .*volume/flywh"):
        back_up(serving, tmp_path / "volume")
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_backup_of_postgresql_moves_back_to_postgresql(postgres, tmp_path):
    url, there = postgres.new_database(), postgres.new_database()
    config = make_config(tmp_path / "root", ["http://127.0.0.1:1"], database_url=url)
    with closing(Ledger.open(config.ledger_url)) as ledger:
        names = record(ledger, 2)
        assert run_here(config, "backup", "--to", str(tmp_path / "backup")) == 0
        with ledger.write() as connection:
            connection.execute(delete(experiences))
    restored = make_config(tmp_path / "backup", ["http://127.0.0.1:1"])
    write_config(restored, tmp_path / "backup/flywheel.yaml")
    assert run_here(restored, "migrate", "--to", there) == 0
    moved = make_config(tmp_path / "backup", ["http://127.0.0.1:1"], database_url=there)
    with closing(Ledger.open(moved.ledger_url)) as ledger, ledger.read() as connection:
        assert connection.execute(select(experiences.c.msg_id)).scalars().all() == names
