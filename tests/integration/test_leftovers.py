"""What a trainer's start deletes, and what not: folders of versions and their rows, without a trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection

from shared.belonging import require_known_versions
from shared.errors import StartupError
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from tests.support.servers import make_config, write_scripted_version
from trainer_service.leftovers import remove_leftovers


@pytest.fixture
def ledger(tmp_path) -> Iterator[Ledger]:
    """Knows versions 0 and 1, which are there."""
    with contextlib.closing(Ledger.open(make_config(tmp_path, ["http://e0"]).ledger_url)) as ledger:
        for version in range(2):
            write_scripted_version(tmp_path, version, -1.0)
            with ledger.write() as connection:
                transitions.publish(connection, version=version, parent=None, kind="full", step=version)
        yield ledger


def reserve(ledger: Ledger, writer: str) -> int:
    with ledger.write() as connection:
        return transitions.reserve_version(connection, writer=writer)


def left(root: Path) -> list[str]:
    return sorted(folder.name for folder in (root / "versions").iterdir())


def test_the_folder_under_the_number_that_a_dead_trainer_had_reserved_is_deleted(tmp_path, ledger):
    assert reserve(ledger, "trainer") == 2
    write_scripted_version(tmp_path, 2, -1.0)
    (tmp_path / "versions/.tmp-v000002-1").mkdir()
    remove_leftovers(tmp_path, ledger, "trainer")
    assert left(tmp_path) == ["v000000", "v000001"]
    assert reserve(ledger, "trainer") == 2


def test_what_another_trainer_is_writing_stays(tmp_path, ledger):
    assert reserve(ledger, "other") == 2
    write_scripted_version(tmp_path, 2, -1.0)
    for name in (".tmp-v000001-1", ".tmp-v000002-1"):
        (tmp_path / "versions" / name).mkdir()
    remove_leftovers(tmp_path, ledger, "trainer")
    assert left(tmp_path) == [".tmp-v000002-1", "v000000", "v000001", "v000002"]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_what_another_trainer_begins_to_write_while_the_ledger_is_read_stays(nth, tmp_path, ledger, monkeypatch):
    reads, read = [0], ledger.read

    @contextlib.contextmanager
    def read_slowly() -> Iterator[Connection]:
        with read() as connection:
            yield connection
        reads[0] += 1
        if reads[0] == nth:
            assert reserve(ledger, "other") == 2
            write_scripted_version(tmp_path, 2, -1.0)
            (tmp_path / "versions/.tmp-v000002-1").mkdir()

    monkeypatch.setattr(ledger, "read", read_slowly)
    remove_leftovers(tmp_path, ledger, "trainer")
    assert reads[0] >= nth
    assert left(tmp_path) == [".tmp-v000002-1", "v000000", "v000001", "v000002"]


@pytest.mark.parametrize(("reserved", "unknown"), [(True, [2, 3]), (False, [2, 3]), (False, [2])])
def test_with_an_older_backup_of_the_ledger_nothing_is_deleted(reserved, unknown, tmp_path, ledger):
    """Also when the backup was made while the first version that it does not know was being written."""
    if reserved:
        assert reserve(ledger, "trainer") == 2
    for version in unknown:
        write_scripted_version(tmp_path, version, -1.0)
    with pytest.raises(StartupError, match="nothing was deleted"):
        remove_leftovers(tmp_path, ledger, "trainer")
    assert left(tmp_path) == [f"v{version:06d}" for version in (0, 1, *unknown)]


@pytest.mark.parametrize(("reserved", "refused"), [(True, False), (False, True)])
def test_a_state_is_kept_and_accepted_only_where_its_version_s_number_is_reserved(reserved, refused, tmp_path, ledger):
    with ledger.write() as connection:
        about = {"step": 1, "version": 1, "state_path": None, "state_sha256": None}
        transitions.announce_trainer(connection, name="trainer", **about)
    if reserved:
        assert reserve(ledger, "trainer") == 2
    (tmp_path / "trainer/trainer/state-000002").mkdir(parents=True)
    with pytest.raises(StartupError, match="state-000002") if refused else contextlib.nullcontext():
        remove_leftovers(tmp_path, ledger, "trainer")
    assert (tmp_path / "trainer/trainer/state-000002").is_dir()


def test_a_trainer_that_was_killed_while_it_saved_its_last_version_s_state_before_its_exit_starts_again(
    tmp_path, ledger
):
    about = {"step": 1, "version": 1, "state_path": None, "state_sha256": None}
    with ledger.write() as connection:
        transitions.announce_trainer(connection, name="trainer", **about)
    write_scripted_version(tmp_path, reserve(ledger, "trainer"), -1.0)
    with ledger.write() as connection:
        transitions.publish_ahead(connection, version=2, trainer="trainer", parent=1, kind="full", step=2)
    (tmp_path / "trainer/trainer/state-000002").mkdir(parents=True)
    assert remove_leftovers(tmp_path, ledger, "trainer").version == 1


def test_the_base_model_s_folder_that_a_crash_left_is_no_other_ledger_s(tmp_path):
    write_scripted_version(tmp_path, 0, -1.0)
    with contextlib.closing(Ledger.open(make_config(tmp_path, ["http://e0"]).ledger_url)) as ledger:
        require_known_versions(tmp_path, ledger)
