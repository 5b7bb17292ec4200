"""With `trainer.save_every` above 1 the status tells of versions and rows that no saved state contains yet."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import update

from shared.errors import DiskFull
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import ledger_status, list_versions
from shared.ledger.tables import batches, versions
from shared.reward import Signal
from shared.stop_request import StopRequest
from shared.versions import Manifest, read_manifest
from tests.support.experiences import record_ready, rows, samples_of, trainer_config
from tests.support.processes import run_here
from tests.support.servers import write_scripted_version
from trainer_service.errors import Stopped
from trainer_service.loop import Trainer
from trainer_service.resume import SavedState, StateStore
from trainer_service.watch.writer import Watch

ABOUT: dict[str, Any] = {"kind": "full", "trainer": "t"}


def claim(ledger: Ledger) -> int:
    with ledger.write() as connection:
        batch_id = transitions.claim(connection, owner="t", at_least=2, at_most=2, lease_s=60.0)
    assert batch_id is not None
    return batch_id


def publish_ahead(ledger: Ledger, version: int) -> None:
    with ledger.write() as connection:
        assert transitions.reserve_version(connection, writer="t") == version
        transitions.publish_ahead(connection, version=version, parent=version - 1, step=version, **ABOUT)


def status(ledger: Ledger) -> dict[str, Any]:
    with ledger.read() as connection:
        return ledger_status(connection)


@pytest.fixture
def ahead(config):
    """State 0 contains nothing. Versions 1 and 2 were published, of two rows each; two more rows are trained on now."""
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
        with ledger.write() as connection:
            transitions.publish(connection, version=0, parent=None, kind="full", step=0)
            about = {"step": 0, "version": 0, "state_path": None, "state_sha256": None}
            transitions.announce_trainer(connection, name="t", **about)
        record_ready(ledger, rows(8))
        held = {}
        for version in (1, 2):
            held[version] = [claim(ledger)]
            publish_ahead(ledger, version)
        claim(ledger)
        yield ledger, held


def test_another_trainer_does_not_delete_the_version_that_the_next_one_descends_from(ahead):
    ledger, held = ahead
    keep: dict[str, Any] = {"max_versions": 1, "max_bytes": 1e12, "sizes": {}, "by": "other"}

    def kept() -> set[int]:
        with ledger.write() as connection:
            transitions.give_up_files(connection, owner="another janitor", **keep)
            return {row.version for row in list_versions(connection) if row.deleted_at is None}

    with ledger.write() as connection:
        for version in (3, 4):
            transitions.publish(connection, version=version, parent=0, kind="full", step=version, trainer="other")
            transitions.serve_version(connection, version, by="an engine")
    assert 2 in kept() and 1 not in kept()
    with ledger.write() as connection:
        contained = {version: held[version] for version in (1, 2)}
        state = {"state_path": "trainer/t/state-000002", "state_sha256": None}
        transitions.record_state(connection, trainer="t", version=2, step=2, contained=contained, **state)
        about = {"trainer": "t", "state_path": "trainer/t/state-000005", "state_sha256": None}
        transitions.publish(connection, version=5, parent=2, kind="full", step=5, **about)
        transitions.serve_version(connection, 5, by="an engine")
    assert 2 not in kept()


def test_rows_that_were_trained_on_and_wait_for_a_state_are_counted(ahead, config, capsys):
    ledger, held = ahead
    found = status(ledger)
    (trainer,) = found["trainers"]
    assert (trainer["step"], trainer["version"]) == (0, 0), "of the saved state"
    assert (trainer["at_step"], trainer["at_version"], trainer["rows_waiting_for_state"]) == (2, 2, 4)
    assert found["rows"]["LEASED"] == 6 and found["pace"]["trained_per_minute"] == 4.0
    assert run_here(config, "status") == 0
    said = capsys.readouterr().out
    assert "step 2  version 2" in said
    assert "trained, waiting for a state: 4 rows; its saved state has step 0, version 0" in said
    with ledger.write() as connection:
        about = {"contained": held, "state_path": "s", "state_sha256": None}
        transitions.record_state(connection, trainer="t", version=2, step=2, **about)
    found = status(ledger)
    (trainer,) = found["trainers"]
    assert (trainer["step"], trainer["at_step"], trainer["at_version"]) == (2, 2, 2)
    assert trainer["rows_waiting_for_state"] == 0 and found["pace"]["trained_per_minute"] == 4.0


def test_rows_of_more_than_a_minute_ago_are_not_in_the_pace_and_wait_all_the_same(ahead):
    ledger, held = ahead
    with ledger.write() as connection:
        connection.execute(update(versions).where(versions.c.version == 1).values(created_at=1000.0))
        connection.execute(update(batches).where(batches.c.id.in_(held[1])).values(created_at=999.0))
    found = status(ledger)
    assert found["trainers"][0]["rows_waiting_for_state"] == 4 and found["pace"]["trained_per_minute"] == 2.0


def test_after_a_restart_nothing_of_what_was_withdrawn_is_counted(ahead):
    ledger, _ = ahead
    with ledger.write() as connection:
        transitions.give_back(connection, owner="t")
        transitions.withdraw_versions(connection, writer="t", after=0)
    found = status(ledger)
    (trainer,) = found["trainers"]
    assert (trainer["at_step"], trainer["at_version"], trainer["rows_waiting_for_state"]) == (0, 0, 0)
    assert found["pace"]["trained_per_minute"] == 0.0


def test_a_withdrawn_version_on_which_engines_had_failed_cannot_be_retried(ahead):
    ledger, _ = ahead
    with ledger.write() as connection:
        assert transitions.fail_version(connection, 2, "engines died of it", by="engine e0")
        transitions.give_back(connection, owner="t")
        transitions.withdraw_versions(connection, writer="t", after=0)
        assert not transitions.retry_version(connection, 2, by="operator")
    with ledger.read() as connection:
        assert [row.state for row in list_versions(connection)] == ["PUBLISHED", "REJECTED", "REJECTED"]


def test_versions_that_an_engine_rejected_are_counted_while_the_trainer_goes_on_from_them(ahead):
    ledger, _ = ahead
    with ledger.write() as connection:
        for version in (1, 2):
            assert transitions.reject_version(connection, version, "other logprobs", by="engine e0")
    (trainer,) = status(ledger)["trainers"]
    assert (trainer["at_step"], trainer["at_version"], trainer["rows_waiting_for_state"]) == (2, 2, 4)


class StoppedAtTheTeacher:
    """A learner without models. A stop is requested while the second batch waits for a teacher."""

    vocabulary, context, trained_bytes, state_bytes = 10, None, 0, 0

    def __init__(self, stop: StopRequest) -> None:
        self._stop, self._batches = stop, 0
        self.saved: SavedState | None = None
        self.costs = dict.fromkeys(("tokens_in", "tokens_computed", "precompute_seconds", "train_seconds"), 0.0)

    def prepare(self, rows: list[Any]) -> list[Any]:
        self._batches += 1
        if self._batches > 1:
            self._stop.set()
            raise Stopped
        return rows

    def train(self, rows: list[Any], **about: int) -> dict[str, float]:
        return {"rows": float(len(rows))}

    def write_version(self, root: Path, *, version: int, **about: Any) -> Manifest:
        return read_manifest(write_scripted_version(root, version, -1.0))

    def save(self, version: int) -> SavedState:
        self.saved = SavedState(f"trainer/trainer/state-{version:06d}", None)
        return self.saved


def test_a_stop_during_the_wait_for_a_teacher_saves_what_no_state_contains(tmp_path):
    config = trainer_config(tmp_path, tmp_path, batch_size=2, save_every=3, min_free_disk_gb=0)
    stop = StopRequest()
    with (
        contextlib.closing(Ledger.open(config.ledger_url)) as ledger,
        contextlib.closing(StateStore(config.root, "trainer")) as states,
        contextlib.closing(Watch(config.trainer, states.folder)) as watch,
    ):
        write_scripted_version(tmp_path, 0, -1.0)
        with ledger.write() as connection:
            transitions.publish(connection, version=0, parent=None, kind="full", step=0)
        record_ready(ledger, rows(4))
        learner: Any = StoppedAtTheTeacher(stop)
        trainer = Trainer(config, ledger, learner, states, stop, watch)
        trainer.resume(None, 0)
        assert not trainer.run()
        found = status(ledger)
    assert learner.saved == SavedState("trainer/trainer/state-000001", None)
    assert found["trainers"][0]["version"] == 1
    assert (found["rows"]["CONSUMED"], found["rows"]["READY"]) == (2, 2)


class WithoutRoom(StoppedAtTheTeacher):
    """A learner whose disk has no room for a state."""

    def save(self, version: int) -> SavedState:
        raise DiskFull("no space left")


def test_a_version_that_was_withdrawn_is_named_of_a_reply_over_which_it_learned_to_prefer_another(
    tmp_path, model, capsys
):
    config = trainer_config(tmp_path, tmp_path, algorithm="dpo", batch_size=1, save_every=3, min_free_disk_gb=0)
    said: dict[str, Any] = {"signals": [Signal("preferred_over", text="m1")], "task_id": None, "run_id": None}
    said |= {"rule": config.reward, "learned": config.trainer.learns_from}
    better, worse, other = rows(3)
    worse = replace(worse, tokens=replace(worse.tokens, reply_ids=np.array([3], np.int32)))
    stop = StopRequest()
    with (
        contextlib.closing(Ledger.open(config.ledger_url)) as ledger,
        contextlib.closing(StateStore(config.root, "trainer")) as states,
        contextlib.closing(Watch(config.trainer, states.folder)) as watch,
    ):
        base = write_scripted_version(tmp_path, 0, -1.0)
        for file in model.glob("tokenizer*"):
            shutil.copy(file, base)
        with ledger.write() as connection:
            transitions.publish(connection, version=0, parent=None, kind="full", step=0)
            transitions.record(connection, samples_of([better, worse, other]))
            for name in ("m0", "m2"):
                transitions.apply_feedback(connection, msg_ids=[name], **said)
            transitions.commit(connection)
        learner: Any = WithoutRoom(stop)
        trainer = Trainer(config, ledger, learner, states, stop, watch)
        trainer.resume(None, 0)
        assert not trainer.run()
        with ledger.write() as connection:
            assert transitions.withdraw_versions(connection, writer="trainer", after=0)
    capsys.readouterr()
    assert run_here(config, "erase", "--message", "m1") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 rows erased; they went into versions 1"
