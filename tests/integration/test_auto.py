"""`algorithm: auto` with a real trainer: it waits for a signal, chooses, and takes up what is said later."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from shared.config import RewardConfig, TrainerConfig
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import TrainerRow, find_trainer, ledger_status
from shared.reward import Lesson, Signal
from tests.integration.test_lessons import stands
from tests.support.experiences import make_experiences, samples_of
from tests.support.lives import Life, Lives
from tests.support.processes import wait_for
from tests.support.trained_roots import BATCH, begin, newest, open_ledger, prepare, weights

LEARNED = TrainerConfig(algorithm="auto").learns_from


def say(ledger: Ledger, names: list[str], signal: Signal) -> None:
    about: dict[str, Any] = {"task_id": None, "run_id": None, "rule": RewardConfig(), "learned": LEARNED}
    with ledger.write() as connection:
        for name in names:
            assert transitions.apply_feedback(connection, msg_ids=[name], signals=[signal], **about)
        transitions.commit(connection)


def status(root: Path) -> dict[str, Any]:
    ledger = open_ledger(root)
    with ledger.read() as connection:
        trainers = ledger_status(connection)["trainers"]
    ledger.close()
    return trainers[0] if trainers else {}


def lines(root: Path, event: str) -> list[str]:
    log = root / "trainer.log"
    return [line for line in log.read_text().splitlines() if event in line] if log.exists() else []


def wait_for_version(root: Path, version: int, trainer: Life) -> None:
    wait_for(lambda: newest(root) == version or not trainer.alive, f"version {version}", 240)
    assert newest(root) == version


def run_two_kinds(root: Path, model: Path, lives: Lives, fault: str | None = None) -> None:
    """Thumbs, then comments on the same rows. fault: kills the trainer once."""
    prepare(root, model, algorithm="auto", hint={"least_effect": 0.0, "neutral_reward": None})
    ledger, rows = open_ledger(root), make_experiences(model, BATCH)
    with begin(lives, root, **({"FAULT": fault} if fault else {})) as trainer:
        wait_for(lambda: lines(root, "waiting for feedback"), "a trainer that waits", 240)
        assert status(root)["alive"], "or `learn` would not start a run, and send no feedback"
        with ledger.write() as connection:
            transitions.record(connection, samples_of(rows))
        for row in rows:
            say(ledger, [row.msg_id], Signal("rating", text="up" if row.reward > 0.5 else "down"))
        wait_for_version(root, 1, trainer)
        assert status(root)["chosen"] == {"algorithms": {"kto": 1.0}}
        say(ledger, [row.msg_id for row in rows], Signal("comment", text="w1 w2"))
        if fault:
            assert trainer.wait(240) == -9
        else:
            wait_for_version(root, 2, trainer)
            assert trainer.stop() == 0
    if fault:
        with begin(lives, root) as trainer:
            wait_for_version(root, 2, trainer)
            assert trainer.stop() == 0
    taught = Lesson.REWARD | Lesson.COMMENT
    assert set(stands(ledger, "state", "teaches", "taught")) == {("CONSUMED", 0, taught)}
    ledger.close()


def test_a_trainer_chooses_by_what_is_said_and_begins_anew_for_a_new_kind_with_nothing_lost(tmp_path, model, lives):
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for root, fault in ((calm, None), (killed, "choose_algorithms committed")):
        root.mkdir()
        run_two_kinds(root, model, lives, fault)
    (first,), (added,) = lines(calm, "algorithms chosen"), lines(calm, "algorithms added")
    assert "kto: 1" in first and "rating" in first
    assert "kto: 1, hint: 0.5" in added and f"comment: {BATCH}" in added
    assert status(calm)["chosen"] == status(killed)["chosen"] == {"algorithms": {"kto": 1.0, "hint": 0.5}}
    assert weights(calm, 1) != weights(calm, 2) == weights(killed, 2)


def test_a_trainer_that_waits_for_feedback_beats_and_says_that_it_ended(tmp_path, model, lives):
    prepare(tmp_path, model, algorithm="auto", lease_s=1.0)

    def heartbeat() -> float:
        return find_trainer_row(tmp_path).heartbeat_at

    with begin(lives, tmp_path) as trainer:
        wait_for(lambda: lines(tmp_path, "waiting for feedback"), "a trainer that waits", 240)
        before = heartbeat()
        wait_for(lambda: heartbeat() > before, "a heartbeat", 60)
        assert trainer.stop() == 0
    row = find_trainer_row(tmp_path)
    assert (row.alive, row.version, row.step, row.state_path) == (False, 0, 0, None)


def find_trainer_row(root: Path) -> TrainerRow:
    with contextlib.closing(open_ledger(root)) as ledger:
        row = ledger.fetch(lambda connection: find_trainer(connection, "trainer"))
    assert row is not None
    return row


def test_a_missing_package_of_a_tracker_ends_the_trainer_before_it_waits_for_a_signal(tmp_path, model, lives):
    prepare(tmp_path, model, algorithm="auto", watch={"tensorboard": True})
    with begin(lives, tmp_path) as trainer:
        wait_for(lambda: not trainer.alive or lines(tmp_path, "waiting for feedback"), "its end", 240)
        assert not lines(tmp_path, "waiting for feedback")
        assert trainer.wait(240) == 2
    assert lines(tmp_path, "trainer.watch.tensorboard is set, and the package tensorboard is not installed")


def test_the_command_shows_what_was_chosen(tmp_path, model, capsys):
    from services.cli import main

    prepare(tmp_path, model, algorithm="auto")
    ledger = open_ledger(tmp_path)
    with ledger.write() as connection:
        about: dict[str, Any] = {"step": 0, "version": 0, "state_path": None, "state_sha256": None}
        transitions.announce_trainer(connection, name="trainer", **about, chosen={"algorithms": {"kto": 1.0}})
    ledger.close()
    assert main(["status", "-c", str(tmp_path / "flywheel.yaml")]) == 0
    assert "by what is said: kto 1" in capsys.readouterr().out
