"""Which saved states of a trainer are kept, also when a rollback meets their deletion. On both databases."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import list_states
from tests.integration.test_retention import config_of, left, make_line, write
from tests.support.servers import write_scripted_version
from trainer_service.janitor import Janitor
from trainer_service.leftovers import remove_leftovers
from trainer_service.resume import SavedState, StateStore


def make_states(ledger: Ledger, root: Path, store: StateStore, newest: int) -> None:
    """Versions 1 to `newest`, which have served, each with a saved state."""
    for version in range(1, newest + 1):
        write_scripted_version(root, version, -1.0)
        (store.folder / f"state-{version:06d}").mkdir()
        with ledger.write() as connection:
            state = {"trainer": "trainer", "state_path": f"trainer/trainer/state-{version:06d}"}
            transitions.publish(connection, version=version, parent=version - 1, kind="full", step=version, **state)
            transitions.serve_version(connection, version, by="engine e0")


def test_states_are_kept_as_long_as_their_versions_and_no_more_than_keep_states(tmp_path, ledger):
    make_line(ledger, tmp_path, served=0, newest=0)
    store = StateStore(tmp_path, "trainer")
    for version in range(1, 6):
        write_scripted_version(tmp_path, version, -1.0)
        folder = store.folder / f"state-{version:06d}"
        folder.mkdir()
        current = SavedState(f"trainer/trainer/{folder.name}", None)
        with ledger.write() as connection:
            about = {"kind": "full", "step": version, "trainer": "trainer", "state_path": current.path}
            transitions.publish(connection, version=version, parent=version - 1, **about)
            transitions.serve_version(connection, version, by="engine e0")
        Janitor(config_of(tmp_path, max_versions=4, keep_states=2), ledger, store).run(current)
        with ledger.read() as connection:
            rows = [row.version for row in list_states(connection, "trainer")]
        kept = [max(1, version - 1), version] if version > 1 else [1]
        assert rows == kept
        assert sorted(state.name for state in store.folder.glob("s*")) == [f"state-{n:06d}" for n in kept]
    write(ledger, lambda c: transitions.reject_version(c, 4, "a reason", by="engine e0"))
    Janitor(config_of(tmp_path, keep_states=2), ledger, store).run(current)
    assert [state.name for state in store.folder.glob("s*")] == ["state-000005"]
    store.close()


def test_the_state_of_a_rejected_version_takes_the_place_of_no_good_one(tmp_path, ledger):
    make_line(ledger, tmp_path, served=0, newest=0)
    store = StateStore(tmp_path, "trainer")
    make_states(ledger, tmp_path, store, 4)
    write(ledger, lambda c: transitions.reject_version(c, 3, "a reason", by="engine e0"))
    config = config_of(tmp_path, max_versions=9, keep_states=2)
    Janitor(config, ledger, store).run(SavedState("trainer/trainer/state-000004", None))
    assert left(tmp_path) == [0, 1, 2, 3, 4], "the rejected version keeps its files"
    assert sorted(state.name for state in store.folder.glob("s*")) == ["state-000002", "state-000004"]
    store.close()


def test_a_trainer_that_knows_of_no_rollback_yet_keeps_the_state_that_it_will_start_from(tmp_path, ledger):
    make_line(ledger, tmp_path, served=0, newest=0)
    store = StateStore(tmp_path, "trainer")
    make_states(ledger, tmp_path, store, 3)
    write(ledger, lambda c: transitions.roll_back(c, 1, by="operator"))
    current = SavedState("trainer/trainer/state-000003", None)
    with ledger.write() as connection:  # a trainer of another name has published more
        for version in (4, 5):
            write_scripted_version(tmp_path, version, -1.0)
            transitions.publish(connection, version=version, parent=1, kind="full", step=version)
    Janitor(config_of(tmp_path, keep_states=1), ledger, store).run(current)
    assert sorted(state.name for state in store.folder.glob("s*")) == ["state-000001", "state-000003"]
    store.close()


@pytest.mark.parametrize("at", ["before the states are deleted", "after"])
def test_a_rollback_that_meets_the_janitor_names_no_state_that_is_deleted(at, tmp_path, ledger, monkeypatch):
    make_line(ledger, tmp_path, served=0, newest=0)
    store = StateStore(tmp_path, "trainer")
    make_states(ledger, tmp_path, store, 4)
    clean = store.clean

    def meet(keep: set[str]) -> None:
        if at == "after":
            clean(keep)
        write(ledger, lambda c: transitions.roll_back(c, 2, by="operator"))
        if at != "after":
            clean(keep)

    monkeypatch.setattr(store, "clean", meet)
    config = config_of(tmp_path, max_versions=9, keep_states=2)
    Janitor(config, ledger, store).run(SavedState("trainer/trainer/state-000004", None))
    row = remove_leftovers(tmp_path, ledger, "trainer")
    assert row is not None and (row.version, row.state_path) == (2, None), "it starts from the weights"
    store.close()


def replaced(ledger: Ledger, root: Path, by: str) -> StateStore:
    """Versions 1 to 4 of a trainer, and 5 to 8 of another one, which has taken its place. Returns its store."""
    make_line(ledger, root, served=0, newest=0)
    store = StateStore(root, "trainer")
    make_states(ledger, root, store, 4)
    for version in range(5, 9):
        write_scripted_version(root, version, -1.0)
        with ledger.write() as connection:
            about = {"kind": "full", "step": version, "trainer": by, "state_path": f"trainer/{by}/state-{version:06d}"}
            transitions.publish(connection, version=version, parent=version - 1, **about)
            transitions.serve_version(connection, version, by="engine e0")
    return store


def clean_as(name: str, ledger: Ledger, root: Path, **versions: object) -> list[int]:
    """Let the janitor of a trainer run. Returns the versions of the states of "trainer" that are left."""
    config = config_of(root, **versions)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"name": name})})
    with contextlib.closing(StateStore(root, name)) as store:
        Janitor(config, ledger, store).run(None)
    with ledger.read() as connection:
        rows = [row.version for row in list_states(connection, "trainer")]
    assert sorted(state.name for state in (root / "trainer/trainer").glob("*s*")) == [f"state-{n:06d}" for n in rows]
    return rows


def test_states_of_a_trainer_that_was_replaced_go_with_their_versions_but_not_the_one_that_its_row_names(
    tmp_path, ledger
):
    replaced(ledger, tmp_path, by="other").close()
    write(ledger, lambda c: transitions.dismiss_trainer(c, name="trainer"))
    write(ledger, lambda c: transitions.tag_version(c, 2, "best"))
    assert clean_as("other", ledger, tmp_path) == [2, 4]
    assert left(tmp_path) == [0, 2, 4, 7, 8], "a tag keeps one, and the row of its trainer the other"
    write(ledger, lambda c: transitions.untag_version(c, 2))
    assert clean_as("other", ledger, tmp_path) == [4]
    row = remove_leftovers(tmp_path, ledger, "trainer")
    assert row is not None and row.state_path == "trainer/trainer/state-000004", "it may come back"


@pytest.mark.parametrize("sign", ["its lock is held", "the ledger does not say that it has ended"])
def test_states_of_a_trainer_that_may_be_at_work_are_its_own_to_delete(sign, tmp_path, ledger):
    """One on another machine may hold a lock that is not seen here; one that was killed looks the same."""
    store = replaced(ledger, tmp_path, by="other")
    if sign == "its lock is held":
        write(ledger, lambda c: transitions.dismiss_trainer(c, name="trainer"))
    else:
        store.close()
    assert clean_as("other", ledger, tmp_path) == [1, 2, 3, 4]
    assert left(tmp_path) == [0, 4, 7, 8]
    store.close()
    write(ledger, lambda c: transitions.dismiss_trainer(c, name="trainer"))
    assert clean_as("other", ledger, tmp_path) == [4]


def test_a_deletion_of_another_trainer_s_states_that_was_cut_short_is_finished_by_the_next_run(
    tmp_path, ledger, monkeypatch
):
    replaced(ledger, tmp_path, by="other").close()
    write(ledger, lambda c: transitions.dismiss_trainer(c, name="trainer"))

    def die(home: Path) -> None:
        if home == tmp_path / "trainer/trainer":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("trainer_service.janitor.sweep", die)
        clean_as("other", ledger, tmp_path)
    assert len(list((tmp_path / "trainer/trainer").glob(".gone-*"))) == 3
    assert clean_as("other", ledger, tmp_path) == [4]
    assert not list((tmp_path / "trainer/trainer").glob(".gone-*"))


def test_a_deletion_of_states_that_was_cut_short_is_finished_by_the_next_run(tmp_path, ledger):
    make_line(ledger, tmp_path, served=0, newest=0)
    store = StateStore(tmp_path, "trainer")
    make_states(ledger, tmp_path, store, 3)
    write(ledger, lambda c: transitions.forget_old_states(c, trainer="trainer", current=None, keep=1))
    assert remove_leftovers(tmp_path, ledger, "trainer") is not None
    Janitor(config_of(tmp_path, keep_states=1), ledger, store).run(SavedState("trainer/trainer/state-000003", None))
    assert [state.name for state in store.folder.glob("s*")] == ["state-000003"]
    store.close()
