"""`flywheel train` on what the trainer must prepare, and where it publishes nothing: as the trainer does online."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from shared.config import RewardConfig, load_config
from shared.ledger import transitions
from shared.ledger.queries import find_trainer
from shared.reward import Signal
from tests.integration.test_offline import ROW, rows_of, train
from tests.support.experiences import make_experiences, samples_of
from tests.support.forms import FULL
from tests.support.models import make_tiny_model
from tests.support.processes import run_here, wait_for
from tests.support.trained_roots import BATCH, begin, open_ledger, prepare, weights

HINT: dict[str, Any] = {"neutral_reward": None, "least_effect": 0.0}
TEACHING: dict[str, dict[str, Any]] = {
    "hint": {"algorithm": "hint", "hint": HINT},
    "a mix": {"algorithms": {"reinforce_pp": 1.0, "hint": 0.5}, "hint": HINT},
    "distill": {"algorithm": "distill"},
}


def figures(folder: Path) -> list[dict[str, Any]]:
    """The records of updates, without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "figures.jsonl").read_text().splitlines()]
    clock = ("at", "seconds", "tokens_per_s")
    return [{name: value for name, value in line.items() if name not in clock} for line in lines]


def exported(lives: Any, root: Path, model: Path, *, rewarded: bool = False, **trainer: Any) -> Path:
    """The export of a root whose trainer made a version of one batch of rows with comments, each of other words."""
    root.mkdir()
    prepare(root, model, **trainer)
    made, ledger, learned = make_experiences(model, BATCH), open_ledger(root), trainer_of(root).learns_from
    with ledger.write() as connection:
        transitions.record(connection, samples_of(made))
        for row in made:
            said = [Signal("comment", text=f"w{row.id} w3")]
            said += [Signal("reward", value=row.reward)] if rewarded else []
            transitions.apply_feedback(
                connection, msg_ids=[row.msg_id], task_id=None, run_id=None, signals=said, rule=RewardConfig(),
                learned=learned,
            )  # fmt: skip
        transitions.commit(connection)
    ledger.close()
    with begin(lives, root) as trainer_process:
        wait_for(lambda: (root / "versions/v000001").exists() or not trainer_process.alive, "a version", 240)
        assert trainer_process.stop() == 0
    run_here(load_config(root / "flywheel.yaml"), "export", "--out", str(root / "rows.parquet"), "--tokens")
    return root / "rows.parquet"


def trainer_of(root: Path) -> Any:
    return load_config(root / "flywheel.yaml").trainer


@pytest.mark.parametrize("teaching", TEACHING if FULL else ["a mix", "distill"])  # the mix has hint in it
def test_words_and_teachers_make_the_very_weights_and_figures_that_they_make_online(teaching, tmp_path, model, lives):
    settings = {"learning_rate": 1e-4, **TEACHING[teaching]}
    if teaching == "distill":
        settings["distill"] = {"path": str(make_tiny_model(tmp_path / "teacher", seed=1))}
    root = tmp_path / "online"
    file = exported(lives, root, model, rewarded=teaching != "hint", **settings)
    train(lives, root, "--from", str(file), "--out", str(tmp_path / "out"))
    assert (tmp_path / "out/model.safetensors").read_bytes() == weights(root, 1) != weights(root, 0)
    (online,), (offline,) = figures(root / "trainer/trainer"), figures(tmp_path / "out")
    if teaching != "hint":
        assert online.pop("reward_by_version") != offline.pop("reward_by_version") == {}, "no ledger, no versions"
    assert offline == online and offline["grad_norm"] > 0


def test_an_adapter_is_written_with_the_path_of_its_base_model_and_the_tokenizer(tmp_path, model, lives):
    prepare(tmp_path, model, lora={"rank": 4}, algorithm="raft", raft={"above": 0.0})
    file = rows_of(tmp_path / "rows.jsonl", *({**ROW, "msg_id": f"m{n}", "reward": 1.0} for n in range(BATCH)))
    train(lives, tmp_path, "--from", str(file), "--out", str(tmp_path / "out"))
    adapter = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(model)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(AutoTokenizer.from_pretrained(model))
    assert len(figures(tmp_path / "out")) == 1


def test_a_file_that_teaches_nothing_publishes_nothing_and_says_what_it_has(tmp_path, model, lives):
    prepare(tmp_path, model, algorithm="hint", hint=HINT)
    comment = {"kind": "comment", "text": "words that this tokenizer does not know"}
    file = rows_of(tmp_path / "rows.jsonl", *({**ROW, "msg_id": f"m{n}", "signals": [comment]} for n in range(3)))
    said = train(lives, tmp_path, "--from", str(file), "--out", str(tmp_path / "out"), status=1)
    assert "no update changed a weight: nothing was published; the rows have comment: 3, and hint learns from" in said
    assert "(empty_words: 3); choose another trainer.algorithm" in said
    assert not list(tmp_path.glob("*out"))


def test_what_the_breaker_would_hold_online_is_not_published(tmp_path, model, lives):
    prepare(tmp_path, model, learning_rate=0.5, breaker={})
    file = rows_of(tmp_path / "rows.jsonl", *({**ROW, "msg_id": f"m{n}", "reward": float(n % 2)} for n in range(BATCH)))
    said = train(lives, tmp_path, "--from", str(file), "--epochs", "3", status=1)
    assert "epoch 1, batch 1: change_of_update=" in said and "is above trainer.breaker.change_of_update=0.52" in said
    assert "lower trainer.learning_rate, or trainer.epochs, or raise trainer.batch_size; nothing was published" in said
    assert "epoch=2/3" not in said
    assert not (tmp_path / "versions/v000001").exists()
    assert len(figures(tmp_path / "trainer/trainer")) == 1
    ledger = open_ledger(tmp_path)
    with ledger.read() as connection:
        row = find_trainer(connection, "trainer")
    ledger.close()
    assert (row.tripped, row.step, row.alive) == (None, 0, False), "its trainer goes on as if nothing had happened"


def test_a_trainer_that_its_breaker_holds_is_not_trained_past_it(tmp_path, model, lives):
    prepare(tmp_path, model)
    ledger = open_ledger(tmp_path)
    with ledger.write() as connection:
        about = {"step": 0, "version": 0, "state_path": None, "state_sha256": None}
        transitions.announce_trainer(connection, name="trainer", **about)
        reason = "f=9 is above its bound; continue with `flywheel trainer --resume`"
        transitions.trip_breaker(connection, name="trainer", tripped={"figure": "f", "reason": reason})
    file = rows_of(tmp_path / "rows.jsonl", *({**ROW, "msg_id": f"m{n}", "reward": n % 2} for n in range(BATCH)))
    said = train(lives, tmp_path, "--from", str(file), status=1)
    assert f"the breaker of trainer 'trainer' has tripped: {reason}, then train again" in said
    assert "trained" not in said
    with ledger.write() as connection:
        assert transitions.reset_breaker(connection, name="trainer")
    ledger.close()
    train(lives, tmp_path, "--from", str(file))
    assert (tmp_path / "versions/v000001").exists()


def test_rehearsal_has_no_effect_and_that_is_said_once(tmp_path, model, lives):
    prepare(tmp_path, model, algorithm="sft", rehearse=1.0)
    correction = {"kind": "correction", "text": "w5 w6"}
    file = rows_of(tmp_path / "rows.jsonl", *({**ROW, "msg_id": f"m{n}", "signals": [correction]} for n in range(20)))
    said = train(lives, tmp_path, "--from", str(file), "--epochs", "2", "--out", str(tmp_path / "out"))
    (line,) = [line for line in said.splitlines() if "rehearse" in line]
    assert "has no effect" in line and "key=trainer.rehearse value=1 " in line
    assert "a file is read as often as --epochs says" in line
