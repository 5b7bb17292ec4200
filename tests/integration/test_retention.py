"""Which versions keep their files: what is in use, tagged or trained on stays, whoever is first. On both databases."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Connection, update

from services.export_model import export_model
from services.trainer import begin_with
from shared.config import Config
from shared.errors import ConfigError, StartupError, VersionError
from shared.experience import Purpose
from shared.experience import VersionState as S
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import list_versions
from shared.ledger.tables import version_leases
from shared.process import process_name
from tests.support.processes import run_here
from tests.support.servers import make_config, write_scripted_version
from trainer_service.janitor import Janitor
from trainer_service.resume import StateStore


def config_of(root: Path, database_url: str | None = None, **versions: object) -> Config:
    config = make_config(root, ["http://e0"], database_url=database_url)
    return Config.model_validate({**config.model_dump(exclude_unset=True), "versions": {"max_versions": 3, **versions}})


def make_line(ledger: Ledger, root: Path, served: int, newest: int) -> None:
    """Versions up to `newest`, each of which has served up to `served`."""
    for version in range(newest + 1):
        write_scripted_version(root, version, -1.0)
        with ledger.write() as connection:
            parent = version - 1 if version else None
            transitions.publish(connection, version=version, parent=parent, kind="full", step=version)
            if version <= served:
                transitions.serve_version(connection, version, by="engine e0")


def janitor(ledger: Ledger, root: Path, **versions: object) -> Janitor:
    store = StateStore(root, "trainer")
    store.close()  # a lock of one's own: nothing else runs here
    return Janitor(config_of(root, **versions), ledger, store)


def left(root: Path) -> list[int]:
    return sorted(int(folder.name[1:]) for folder in (root / "versions").iterdir())


def states(ledger: Ledger) -> dict[int, str]:
    with ledger.read() as connection:
        return {row.version: row.state for row in list_versions(connection)}


def write(ledger: Ledger, work: Callable[[Connection], object]) -> object:
    with ledger.write() as connection:
        return work(connection)


def lease(version: int, purpose: Purpose = Purpose.LOADING, owner: str = "explorer", **more: bool):
    return lambda c: transitions.lease_version(c, version, reader="http://e0", purpose=purpose, owner=owner, **more)


def give_up(connection: Connection, max_versions: int = 3) -> list[int]:
    about = {"owner": "janitor", "max_versions": max_versions, "max_bytes": 1e12, "sizes": {}, "by": "trainer"}
    return transitions.give_up_files(connection, **about)


def test_the_oldest_go_first_what_is_out_of_use_before_what_has_served_and_the_rows_stay(tmp_path, ledger):
    make_line(ledger, tmp_path, served=5, newest=5)
    write(ledger, lambda c: transitions.reject_version(c, 4, "a reason", by="engine e0"))
    janitor(ledger, tmp_path, max_versions=5).run(None)
    assert left(tmp_path) == [0, 1, 2, 3, 5]
    janitor(ledger, tmp_path).run(None)
    assert left(tmp_path) == [0, 3, 5]
    assert states(ledger) == {**dict.fromkeys(range(4), S.RETIRED), 4: S.REJECTED, 5: S.SERVING}


def test_versions_go_until_they_take_no_more_than_max_gb(tmp_path, ledger):
    make_line(ledger, tmp_path, served=4, newest=4)
    size = sum(file.stat().st_size for file in (tmp_path / "versions/v000001").iterdir())
    janitor(ledger, tmp_path, max_versions=100, max_gb=3.5 * size / 1024**3).run(None)
    assert left(tmp_path) == [0, 3, 4]


def test_without_engines_the_versions_that_none_took_up_go_but_not_the_newest(tmp_path, ledger):
    make_line(ledger, tmp_path, served=-1, newest=5)
    janitor(ledger, tmp_path).run(None)
    assert left(tmp_path) == [0, 4, 5]
    assert states(ledger)[3] == S.SKIPPED
    assert states(ledger)[4] == S.PUBLISHED


KEPT = {
    "a lease": lease(1),
    "a lease that lasts": lease(1, Purpose.DELTA_BASE, lasts=True),
    "a tag": lambda c: transitions.tag_version(c, 1, "best"),
    "a trainer": lambda c: transitions.announce_trainer(
        c, name="another", step=1, version=1, state_path=None, state_sha256=None
    ),
    "an engine that holds it": lambda c: (
        transitions.acquire_engine(c, "http://e1", "explorer"),
        transitions.set_engine_state(c, "http://e1", "explorer", "reloading", 1),
    ),
}


@pytest.mark.parametrize("kept_by", KEPT)
def test_what_somebody_needs_stays_and_goes_when_nobody_does(kept_by, tmp_path, ledger, monkeypatch):
    monkeypatch.setattr("shared.ledger.transitions.engine_leases.ENGINE_LEASE_S", 600.0)
    make_line(ledger, tmp_path, served=4, newest=4)
    write(ledger, KEPT[kept_by])
    janitor(ledger, tmp_path).run(None)
    assert left(tmp_path) == [0, 1, 3, 4], "and the newest that has served, to which engines go back"
    with ledger.write() as connection:
        transitions.untag_version(connection, 1)
        for purpose in Purpose:
            transitions.release_version(connection, reader="http://e0", purpose=purpose)
        about = {"name": "another", "step": 1, "state_path": None, "state_sha256": None}
        transitions.announce_trainer(connection, **about, version=4)
        transitions.sign_off(connection, "explorer")
    make_line_longer(ledger, tmp_path, 5)
    janitor(ledger, tmp_path).run(None)
    assert left(tmp_path) == [0, 4, 5]


def make_line_longer(ledger: Ledger, root: Path, version: int) -> None:
    write_scripted_version(root, version, -1.0)
    with ledger.write() as connection:
        transitions.publish(connection, version=version, parent=version - 1, kind="full", step=version)
        transitions.serve_version(connection, version, by="engine e0")


def test_a_lease_that_is_not_renewed_or_whose_owner_is_gone_keeps_nothing(tmp_path, ledger):
    make_line(ledger, tmp_path, served=5, newest=5)
    machine, pid, start, digits = process_name().split("-")
    write(ledger, lease(1, owner=f"{machine}-{pid}-{int(start) + 1}-{digits}"))
    write(ledger, lease(2, owner="explorer"))
    write(ledger, lease(3, owner="another"))
    write(ledger, lambda c: c.execute(update(version_leases).values(until=1.0)))
    write(ledger, lambda c: transitions.heartbeat(c, "another", {}))
    janitor(ledger, tmp_path).run(None)
    assert left(tmp_path) == [0, 3, 4, 5]


def test_a_trainer_that_dies_in_its_start_on_another_machine_keeps_one_version_for_a_day(tmp_path, ledger, monkeypatch):
    monkeypatch.setattr("services.trainer.process_name", lambda: "far-away")
    make_line(ledger, tmp_path, served=1, newest=1)
    assert begin_with(ledger, "dead") == 1
    for version in range(2, 7):
        make_line_longer(ledger, tmp_path, version)
        assert version > 2 or begin_with(ledger, "dead") == 2
    janitor(ledger, tmp_path).run(None)
    assert left(tmp_path) == [0, 2, 5, 6]
    write(ledger, lambda c: c.execute(update(version_leases).values(until=version_leases.c.until - 86_400)))
    janitor(ledger, tmp_path).run(None)
    assert left(tmp_path) == [0, 5, 6]


def test_an_export_that_dies_on_another_machine_keeps_its_version_for_a_day(tmp_path, ledger, config, monkeypatch):
    make_line(ledger, tmp_path, served=4, newest=4)
    monkeypatch.setattr("services.export_model.process_name", lambda: "far-away")
    found = []

    def die(*_: object) -> None:
        for until in (version_leases.c.until, version_leases.c.until - 86_400):
            write(ledger, lambda c, until=until: c.execute(update(version_leases).values(until=until)))
            janitor(ledger, tmp_path).run(None)
            found.append(left(tmp_path))
        raise VersionError("it ended")

    monkeypatch.setattr("services.export_model._write_verified", die)
    with pytest.raises(StartupError, match="it ended"):
        export_model(config, 1, tmp_path.parent / f"{tmp_path.name}-out", merged=False)
    assert found == [[0, 1, 3, 4], [0, 3, 4]]


def test_a_version_that_its_trainer_still_writes_is_not_exported(tmp_path, ledger, config):
    make_line(ledger, tmp_path, served=1, newest=1)
    assert write(ledger, lambda c: transitions.reserve_version(c, writer="trainer")) == 2
    with pytest.raises(StartupError, match="version 2 is not published yet; versions with files: 0, 1"):
        export_model(config, 2, tmp_path / "out", merged=False)


def test_nobody_reads_what_is_given_up(tmp_path, ledger):
    make_line(ledger, tmp_path, served=4, newest=4)
    assert write(ledger, give_up) == [1, 2]
    for refused in (
        lease(1),
        lambda c: transitions.tag_version(c, 1, "best"),
        lambda c: transitions.serve_version(c, 1, by="engine e0"),
    ):
        assert not write(ledger, refused)
    assert left(tmp_path) == [0, 1, 2, 3, 4], "the folders are deleted afterwards"


@pytest.mark.parametrize("ahead", [False, True], ids=["with its state", "ahead of its state"])
def test_the_base_of_a_delta_stays_as_long_as_the_delta_and_no_longer(ahead, ledger):
    for version in range(7):
        about = {"parent": version - 1 if version else None, "kind": "full", "step": version}
        about |= {"delta_of": 1, "kind": "delta"} if version == 2 else {}
        with ledger.write() as connection:
            if ahead:
                transitions.reserve_version(connection, writer="trainer")
                transitions.publish_ahead(connection, version=version, trainer="trainer", **about)
            else:
                transitions.publish(connection, version=version, **about)
            assert transitions.serve_version(connection, version, by="engine e0")
    assert write(ledger, lambda c: transitions.tag_version(c, 2, "best"))
    assert write(ledger, give_up) == [3, 4]
    assert write(ledger, lambda c: transitions.untag_version(c, 2))
    assert write(ledger, give_up) == [2, 1]


def test_rejected_versions_go_before_any_that_has_served_also_if_one_is_a_delta_of_another(ledger):
    for version in range(12):
        about = {"parent": version - 1 if version else None, "kind": "full", "step": version}
        with ledger.write() as connection:
            transitions.publish(connection, version=version, delta_of=version - 1 if version % 4 else None, **about)
            transitions.serve_version(connection, version, by="engine e0")
    assert write(ledger, lambda c: transitions.roll_back(c, 8, by="operator")).rejected == [9, 10, 11]
    assert write(ledger, lambda c: transitions.serve_version(c, 8, by="engine e0"))
    assert write(ledger, lambda c: give_up(c, max_versions=10)) == [11, 10]
    assert write(ledger, lambda c: give_up(c, max_versions=8)) == [9, 3]
    assert write(ledger, lambda c: give_up(c, max_versions=5)) == [2, 1]


def test_a_version_that_failed_goes_before_an_older_one_that_has_served(tmp_path, ledger):
    make_line(ledger, tmp_path, served=2, newest=3)
    assert write(ledger, lambda c: transitions.fail_version(c, 3, "engines hung on it", by="explorer"))
    make_line_longer(ledger, tmp_path, 4)
    assert write(ledger, lambda c: give_up(c, max_versions=4)) == [3]


def test_a_version_that_has_served_goes_before_one_that_waits_for_an_engine(tmp_path, ledger):
    make_line(ledger, tmp_path, served=3, newest=5)
    assert write(ledger, lambda c: give_up(c, max_versions=5)) == [1]


@pytest.mark.parametrize("reader_is_first", [True, False])
def test_a_reader_and_a_deletion_at_the_same_moment_never_both_succeed(reader_is_first, tmp_path, ledger):
    """Whoever comes second waits for the first to commit, and sees it."""
    make_line(ledger, tmp_path, served=3, newest=3)
    works: list[Callable[[Connection], object]] = [lease(1), give_up]
    if not reader_is_first:
        works.reverse()
    results: list[object] = []
    first_is_done, second_has_begun = threading.Event(), threading.Event()

    def first() -> None:
        with ledger.write() as connection:
            results.append(works[0](connection))
            first_is_done.set()
            second_has_begun.wait(240)
            threading.Event().wait(0.3)  # for the second to come to the lock; what is found does not hang on it

    thread = threading.Thread(target=first)
    thread.start()
    assert first_is_done.wait(240)
    second_has_begun.set()
    second = write(ledger, works[1])
    thread.join(240)
    assert results == ([True] if reader_is_first else [[1]])
    assert second == ([] if reader_is_first else False)


def test_a_deletion_that_was_cut_short_is_finished_by_the_next_run(tmp_path, ledger):
    make_line(ledger, tmp_path, served=4, newest=4)
    write(ledger, give_up)
    versions = tmp_path / "versions"
    (versions / "v000002").rename(versions / ".gone-v000002")
    (versions / ".gone-v000002/model.safetensors").unlink()
    janitor(ledger, tmp_path).run(None)
    assert [folder.name for folder in sorted(versions.iterdir())] == ["v000000", "v000003", "v000004"]


def test_an_operator_names_a_version_and_takes_the_name_away(tmp_path, ledger, database_url, capsys):
    config = config_of(tmp_path, database_url)
    make_line(ledger, tmp_path, served=4, newest=4)
    assert run_here(config, "versions", "tag", "1", "best") == 0
    janitor(ledger, tmp_path).run(None)
    assert left(tmp_path) == [0, 1, 3, 4]
    assert run_here(config, "versions") == 0
    shown = capsys.readouterr().out
    assert "tag best" in shown and "files gone" in shown
    with pytest.raises(StartupError, match="version 2"):
        run_here(config, "versions", "tag", "2", "best")
    assert run_here(config, "versions", "tag", "4", "best") == 0, "a name moves"
    with pytest.raises(StartupError, match="version 1"):
        run_here(config, "versions", "untag", "1")
    assert run_here(config, "versions", "untag", "4") == 0
    with pytest.raises(ConfigError, match="a name"):
        run_here(config, "versions", "tag", "4")
