"""Which saved states of a trainer are kept, also when a rollback meets their deletion. On both databases."""

from __future__ import annotations

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


def test_a_deletion_of_states_that_was_cut_short_is_finished_by_the_next_run(tmp_path, ledger):
    make_line(ledger, tmp_path, served=0, newest=0)
    store = StateStore(tmp_path, "trainer")
    make_states(ledger, tmp_path, store, 3)
    write(ledger, lambda c: transitions.forget_old_states(c, trainer="trainer", current=None, keep=1))
    assert remove_leftovers(tmp_path, ledger, "trainer") is not None
    Janitor(config_of(tmp_path, keep_states=1), ledger, store).run(SavedState("trainer/trainer/state-000003", None))
    assert [state.name for state in store.folder.glob("s*")] == ["state-000003"]
    store.close()
