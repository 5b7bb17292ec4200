"""`flywheel train`: the trainer's own updates on an export, into a folder or as the next version."""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.config import load_config
from shared.errors import ConfigError, StartupError
from shared.experience import choice_name
from shared.ledger import queries, transitions
from shared.ledger.queries import find_trainer, list_versions
from shared.reward import Lesson, Signal
from tests.support.experiences import make_experiences, rows
from tests.support.models import make_tiny_model
from tests.support.processes import run_here, wait_for
from tests.support.samples import sample
from tests.support.trained_roots import BATCH, begin, open_ledger, prepare, weights
from trainer_service.export import batches_of, read_export


@pytest.fixture(scope="module")
def trained(tmp_path_factory, model, lives) -> Path:
    """A root whose trainer made a version of one batch, and the export of its ledger."""
    root = tmp_path_factory.mktemp("online")
    prepare(root, model, make_experiences(model, BATCH))
    with begin(lives, root) as trainer:
        wait_for(lambda: (root / "versions/v000001").exists() or not trainer.alive, "a version", 240)
        assert trainer.stop() == 0
    run_here(load_config(root / "flywheel.yaml"), "export", "--out", str(root / "rows.parquet"), "--tokens")
    return root


def train(lives: Any, root: Path, *arguments: str, status: int = 0, **faults: str) -> str:
    """Run `flywheel train` to its end, and return what it logged."""
    log = root / "offline.log"
    with lives.begin(["train", "-c", str(root / "flywheel.yaml"), *arguments], log, **faults) as life:
        assert life.wait(240) == status, log.read_text()
    return log.read_text()


def test_an_export_trains_a_model_to_the_very_bits_of_the_trainer_on_the_ledger(trained, tmp_path, model, lives):
    (tmp_path / "other").mkdir()
    prepare(tmp_path / "other", model)
    said = train(lives, tmp_path / "other", "--from", str(trained / "rows.parquet"), "--out", str(tmp_path / "out"))
    assert "rows read" in said and "epoch=1/1 batch=1/1" in said
    assert (tmp_path / "out/model.safetensors").read_bytes() == weights(trained, 1) != weights(trained, 0)
    AutoTokenizer.from_pretrained(tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"], "nothing is left beside it"
    assert not (tmp_path / "out/MANIFEST.json").exists()
    assert not (tmp_path / "other/trainer").exists(), "root_dir is not touched"


def test_a_model_is_trained_beside_a_trainer_that_listens_on_the_port_of_the_same_file(trained, tmp_path, model, lives):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        prepare(tmp_path, model, watch={"port": taken.getsockname()[1]})
        train(lives, tmp_path, "--from", str(trained / "rows.parquet"), "--out", str(tmp_path / "out"))
    assert (tmp_path / "out/model.safetensors").exists()


def test_an_export_makes_the_next_version_of_a_root_which_its_trainer_goes_on_from(trained, tmp_path, model, lives):
    prepare(tmp_path, model, make_experiences(model, BATCH, seed=1))
    with begin(lives, tmp_path) as trainer:
        wait_for(lambda: (tmp_path / "versions/v000001").exists() or not trainer.alive, "a version", 240)
        assert trainer.stop() == 0
    ledger = open_ledger(tmp_path)
    with ledger.write() as connection:
        transitions.record(connection, [sample("chatcmpl-0-0"), sample("chatcmpl-9-0")])  # one of them is in the file
    train(lives, tmp_path, "--from", str(trained / "rows.parquet"), "--epochs", "2")
    with ledger.write() as connection:
        assert transitions.erase(connection, msg_id="chatcmpl-0-0").versions == {2}
        assert transitions.erase(connection, msg_id="chatcmpl-9-0").versions == set()
        versions = [(row.version, row.parent, row.step, row.state) for row in list_versions(connection)]
        trainer_row = find_trainer(connection, "trainer")
    ledger.close()
    assert versions[2] == (2, 1, 3, "PUBLISHED")
    assert (trainer_row.version, trainer_row.step, trainer_row.alive) == (2, 3, False)
    assert weights(tmp_path, 2) != weights(tmp_path, 1)


def test_the_next_version_is_not_published_before_its_state_is_saved_however_seldom_the_trainer_saves(
    trained, tmp_path, model, lives
):
    prepare(tmp_path, model, save_every=10)
    said = train(lives, tmp_path, "--from", str(trained / "rows.parquet"), FULL_DISK='{"state": 1}')
    assert "not published: the disk is full; trying again" in said
    with contextlib.closing(open_ledger(tmp_path)) as ledger, ledger.read() as connection:
        trainer_row, versions = find_trainer(connection, "trainer"), list_versions(connection)
    assert [(row.version, row.state) for row in versions] == [(0, "PUBLISHED"), (1, "PUBLISHED")]
    assert trainer_row.version == 1 and (tmp_path / trainer_row.state_path).is_dir()


def test_rewards_that_fell_in_the_ledger_do_not_keep_an_export_from_being_trained_on(trained, tmp_path, model, lives):
    """They fell before this training, which may be to repair it."""
    fell = [
        replace(row, reward=reward)
        for version, reward in enumerate((1.0, 1.0, 0.0, 0.0), start=1)
        for row in rows(4, version=version, name=f"m{version}-")
    ]
    bounds = {"change_of_update": None, "reward_versions": 2, "reward_rows": 1}
    prepare(tmp_path, model, fell, breaker=bounds)
    train(lives, tmp_path, "--from", str(trained / "rows.parquet"))
    assert weights(tmp_path, 1) != weights(tmp_path, 0)


def test_training_that_is_stopped_says_so_fails_and_leaves_nothing(trained, tmp_path, model, lives):
    prepare(tmp_path, model)
    log = tmp_path / "offline.log"
    arguments = ["train", "-c", str(tmp_path / "flywheel.yaml"), "--from", str(trained / "rows.parquet")]
    with lives.begin([*arguments, "--epochs", "100000", "--out", str(tmp_path / "out")], log) as life:
        wait_for(lambda: (log.exists() and "trained" in log.read_text()) or not life.alive, "an update", 240)
        assert life.stop() == 1
    assert "asked to stop before all epochs were done; nothing was published" in log.read_text()
    assert not list(tmp_path.glob("*out"))


def test_a_training_that_runs_is_seen_alive(trained, tmp_path, model, lives):
    prepare(tmp_path, model, lease_s=1.0)
    log, ledger = tmp_path / "offline.log", open_ledger(tmp_path)

    def last_heartbeat() -> float:
        row = ledger.fetch(lambda connection: find_trainer(connection, "trainer"))
        return 0.0 if row is None else row.heartbeat_at

    arguments = ["train", "-c", str(tmp_path / "flywheel.yaml"), "--from", str(trained / "rows.parquet")]
    with lives.begin([*arguments, "--epochs", "100000"], log) as life:
        wait_for(lambda: (log.exists() and "trained" in log.read_text()) or not life.alive, "an update", 240)
        before = last_heartbeat()
        wait_for(lambda: last_heartbeat() > before or not life.alive, "a heartbeat", 60)
        assert life.stop() == 1
    assert last_heartbeat() > before


def rows_of(file: Path, *exported: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in exported))
    return file


ROW = {"msg_id": "m", "prompt_ids": [5, 6], "reply_ids": [7], "logprobs": [-0.5], "reward": 1.0}


@pytest.fixture
def config(tmp_path, model):
    prepare(tmp_path, model, max_trajectory_tokens=40)
    return load_config(tmp_path / "flywheel.yaml")


@pytest.mark.parametrize(
    ("exported", "said"),
    [
        (
            [{"messages": [], "reward": 1}],
            r"no row has tokens \(1 without tokens\); export it again with --tokens; `flywheel import` gives rows of "
            r"messages their tokens",
        ),
        (
            [ROW, {**ROW, "tokenizer": "ab12"}],
            "row 2: its tokens are of the tokenizer ab12, and .* has [0-9a-f]{16}; set",
        ),
        (
            [{**ROW, "reward": None, "signals": [{"kind": "comment", "text": "w1"}]}],
            r"nothing was said of its rows that ppo learns from; choose another trainer.algorithm \(its rows have "
            r"comment: 1; ppo learns from metric, rating, reward\)",
        ),
        (
            [{**ROW, "logprobs": []}],
            r"no row has tokens \(1 unusable \(it does not have one logprob for each reply token\)\)",
        ),
        (
            [{**ROW, "reply_ids": [2**40]}],
            r"1 unusable \(something among its token ids is none\)",
        ),
        (
            [{**ROW, "prompt_ids": [5] * 40}],
            r"unusable \(it has more tokens than the 40 that are trained on \(trainer\.max_trajectory_tokens, .*\)\)",
        ),
        ([{**ROW, "state": "DISCARDED"}], r"no row has tokens \(1 DISCARDED\)"),
        ([{**ROW, "reward": 1e308}], r"1 unusable \(reward 1e\+308 is outside of reward\.accept="),
    ],
)
def test_an_export_that_cannot_be_trained_on_is_refused_by_name(exported, said, config, tmp_path, model):
    with pytest.raises(StartupError, match=said):
        read_export(rows_of(tmp_path / "rows.jsonl", *exported), config, model)


def test_the_tokenizer_of_an_export_is_its_models(trained, config, tmp_path, model):
    assert len(read_export(trained / "rows.parquet", config, model)) == BATCH
    other = make_tiny_model(tmp_path / "other")
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"]["w0"], vocabulary["model"]["vocab"]["w1"] = 9, 8
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(StartupError, match=r"row 1: its tokens are of the tokenizer"):
        read_export(trained / "rows.parquet", config, other)


def test_wrong_calls_are_one_line(config, tmp_path):
    file = str(rows_of(tmp_path / "rows.jsonl", ROW))
    with pytest.raises(ConfigError, match="--epochs 0 is not at least 1"):
        run_here(config, "train", "--from", file, "--epochs", "0")
    with pytest.raises(StartupError, match="exists; name a folder that does not"):
        run_here(config, "train", "--from", file, "--out", str(tmp_path))
    with pytest.raises(StartupError, match=r"the folder of --out .* does not exist; make it"):
        run_here(config, "train", "--from", file, "--out", str(tmp_path / "none/out"))
    with pytest.raises(StartupError, match=r"no\.jsonl cannot be read"):
        run_here(config, "train", "--from", "no.jsonl", "--out", str(tmp_path / "out"))
    pointed = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path)})})
    for damaged in ("version https://git-lfs", "[1]"):
        (tmp_path / "tokenizer.json").write_text(damaged)
        with pytest.raises(StartupError, match=r"tokenizer\.json is not a tokenizer's JSON"):
            run_here(pointed, "train", "--from", file, "--out", str(tmp_path / "out"))
    ranks = config.model_copy(update={"trainer": config.trainer.model_copy(update={"ranks": 2})})
    with pytest.raises(ConfigError, match="runs on one rank; set it to 1"):
        run_here(ranks, "train", "--from", file)


def test_signals_become_credit_by_the_rule_and_silent_runs_are_left_out(config, tmp_path, model):
    run = {**ROW, "task_id": "t", "run_id": "1"}
    outcome = [{"kind": "rating", "text": "up", "scope": "run"}]
    file = rows_of(
        tmp_path / "rows.jsonl", {**run, "signals": outcome}, {**run, "msg_id": "n", "reward": None},
        {**ROW, "msg_id": "silent", "reward": None},
    )  # fmt: skip
    first, second = read_export(file, config, model)
    assert (first.outcome, first.own_reward, second.own_reward) == (1.0, None, None)
    assert first.acts & Lesson.REWARD


def test_batches_keep_trajectories_whole_in_an_order_that_the_seed_decides(config):
    turns = [replace(rows(1)[0], id=n, msg_id=f"m{n}", conversation_id=f"c{n // 3}") for n in range(30)]
    first, again, other = (batches_of(turns, config, epoch) for epoch in (1, 1, 2))
    assert [[r.id for r in batch] for batch in first] == [[r.id for r in batch] for batch in again]
    assert first != other
    assert sorted(r.id for batch in first for r in batch) == list(range(30))
    assert [len(batch) for batch in first] == [9, 9, 9, 3], "a batch of 8 is exceeded by what a trajectory needs"
    assert all(
        len({r.id for r in batch} & {3 * n, 3 * n + 1, 3 * n + 2}) in (0, 3) for batch in first for n in range(10)
    )


def test_choices_of_a_message_are_trajectories_of_their_own_as_on_the_ledger(config, tmp_path, model):
    choices = [{**ROW, "choice": choice, "reply_ids": [7 + choice]} for choice in (0, 1)]
    read = read_export(rows_of(tmp_path / "rows.jsonl", *choices), config, model)
    with contextlib.closing(open_ledger(tmp_path)) as ledger, ledger.write() as connection:
        transitions.record(connection, [sample("m", choice=choice) for choice in (0, 1)])
        said = {"signals": [Signal("reward", value=1.0)], "rule": config.reward, "task_id": None, "run_id": None}
        transitions.apply_feedback(connection, msg_ids=["m"], **said)
        transitions.commit(connection)
        batch = transitions.claim(connection, owner="t", at_least=2, at_most=2, lease_s=60)
        leased = queries.load_lease(connection, batch).rows
    assert [row.conversation_id for row in read] == [row.conversation_id for row in leased] == ["m", "m#1"]


def test_batches_keep_choices_of_a_message_together_where_rewards_are_compared(config):
    grouped = config.model_copy(update={"trainer": config.trainer.model_copy(update={"algorithm": "grpo"})})
    choices = [
        replace(rows(1)[0], id=n, msg_id=f"m{n // 3}", choice=n % 3, conversation_id=choice_name(f"m{n // 3}", n % 3))
        for n in range(30)
    ]
    for batch in batches_of(choices, grouped, 1):
        found = [row.msg_id for row in batch]
        assert all(found.count(name) == 3 for name in found)


def test_token_ids_that_the_model_does_not_know_are_refused_before_an_update(config, tmp_path, lives):
    file = rows_of(tmp_path / "rows.jsonl", {**ROW, "prompt_ids": [5, 40_000]})
    log = tmp_path / "offline.log"
    arguments = ["train", "-c", str(tmp_path / "flywheel.yaml"), "--from", str(file), "--out", str(tmp_path / "out")]
    with lives.begin(arguments, log) as life:
        assert life.wait(240) == 1
    assert "row 1: the token id 40000 is outside of the model's vocabulary of 208; set model.path" in log.read_text()
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_preferences_find_their_replies_in_the_file(config, tmp_path, model):
    dpo = config.model_copy(update={"trainer": config.trainer.model_copy(update={"algorithm": "dpo"})})
    over = [{"kind": "preferred_over", "text": name} for name in ("n", "elsewhere", "gone")]
    file = rows_of(
        tmp_path / "rows.jsonl", {**ROW, "signals": over}, {**ROW, "msg_id": "n", "reply_ids": [8]},
        {**ROW, "msg_id": "elsewhere", "prompt_ids": [9]},
    )  # fmt: skip
    (row,) = read_export(file, dpo, model)
    assert [other.name for other in row.preferred_over] == ["n"]
    assert row.unused == ("preference_other_prompt", "preference_unknown")
