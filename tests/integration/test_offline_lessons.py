"""What acts of a file's rows is what acts of them in the ledger, whatever else was said."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from shared.config import RewardConfig, load_config
from shared.errors import StartupError
from shared.experience import Tokens
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.reward import Signal
from tests.integration.test_offline import train
from tests.support.experiences import make_experiences, rows, samples_of, trainer_config
from tests.support.processes import run_here
from tests.support.trained_roots import open_ledger, prepare
from trainer_service.batch import make_batch
from trainer_service.export import read_export
from trainer_service.offline import OfflineTrainer, within_context

SAID = [[Signal("reward", value=1.0)], [Signal("comment", text="w7 w3"), Signal("correction", text="w9")]]


def two_turns(model):
    """A conversation whose second prompt begins with the first turn."""
    first, second = make_experiences(model, 2)
    asked = np.concatenate([first.tokens.prompt_ids, first.tokens.reply_ids, second.tokens.prompt_ids])
    tokens = Tokens(asked.astype(np.int32), second.tokens.reply_ids, second.tokens.logprobs)
    return [first, replace(second, tokens=tokens)]


def shape(rows):
    """Which rows share a sequence, which of these are rewarded, and with what."""
    batch = make_batch(rows)
    return (
        [one.row_ids for one in batch.sequences],
        batch.rewarded,
        batch.rewards,
        [len(t.turns) for t in batch.trajectories],
    )


@pytest.mark.parametrize("algorithms", [{"hint": 1.0}, {"sft": 1.0}, {"hint": 1.0, "reinforce_pp": 1.0}])
def test_rewards_that_no_algorithm_learns_from_act_neither_in_the_ledger_nor_in_a_file(algorithms, tmp_path, model):
    config = trainer_config(tmp_path, model, algorithms=algorithms)
    kinds, made = config.trainer.learns_from, two_turns(model)
    with closing(Ledger.open(config.ledger_url)) as ledger, ledger.write() as connection:
        samples = [replace(one, task_id="t", run_id="r") for one in samples_of(made)]
        transitions.record(connection, samples)
        for row, said in zip(made, SAID, strict=True):
            about = {"msg_ids": [row.msg_id], "task_id": None, "run_id": None, "signals": said}
            transitions.apply_feedback(connection, **about, rule=RewardConfig(), learned=kinds)
        transitions.commit(connection)
        batch_id = transitions.claim(connection, owner="trainer", at_least=1, at_most=2, lease_s=60)
        assert batch_id is not None
        leased = queries.load_lease(connection, batch_id, kinds=kinds).rows
    run_here(config, "export", "--out", str(tmp_path / "rows.jsonl"), "--tokens")
    assert shape(read_export(tmp_path / "rows.jsonl", config, model)) == shape(leased)


def test_rows_of_a_file_that_are_longer_than_the_models_context_are_left_out_as_a_trainer_does():
    short, long = rows(2)
    ids = np.arange(1, 5, dtype=np.int32)
    long = replace(long, tokens=Tokens(ids, ids, np.zeros(4, np.float32)))
    assert within_context([short, long], 7) == [short]
    assert within_context([short, long], 8) == [short, long]
    with pytest.raises(StartupError, match="longer than the model's context of 7 tokens"):
        within_context([long], 7)


ROW = {"prompt_ids": [1], "reply_ids": [2], "logprobs": [-0.5], "conversation_id": "c"}
WHOLE = {"kind": "correction", "text": "w9", "scope": "conversation"}


@pytest.mark.parametrize("left_out", [{"state": "DISCARDED"}, {"prompt_ids": [1] * 99}, {"logprobs": []}])
def test_a_correction_of_a_whole_is_not_learned_at_an_earlier_turn_if_the_last_reply_is_left_out(
    left_out, tmp_path, model
):
    config = trainer_config(tmp_path, model, algorithm="sft", max_trajectory_tokens=50)
    first, last = ({**ROW, "msg_id": name, "signals": [WHOLE]} for name in ("m1", "m2"))
    first["signals"] = [{"kind": "correction", "text": "w3"}, WHOLE]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [first, {**last, **left_out}])))
    (read,) = read_export(tmp_path / "rows.jsonl", config, model)
    assert [one.text for one in read.signals] == ["w3"]


def test_a_correction_of_a_whole_whose_last_reply_is_longer_than_the_context_is_not_learned_at_an_earlier_turn(
    tmp_path, model
):
    config = trainer_config(tmp_path, model, algorithm="sft")
    first, last = (replace(rows(1)[0], id=n, conversation_id="c", signals=(Signal(**WHOLE),)) for n in (1, 2))
    last = replace(last, tokens=replace(last.tokens, prompt_ids=np.ones(50, np.int32)))
    learner = SimpleNamespace(vocabulary=1000, context=50)
    trainer = SimpleNamespace(_config=config, _learner=learner, _base_folder=model)
    (read,) = OfflineTrainer._require_known(trainer, [first, last])
    assert read is first


def test_a_turn_before_its_parent_in_the_file_is_read_and_so_are_repeated_rows(tmp_path, model):
    config = trainer_config(tmp_path, model, algorithm="reinforce_pp")
    child, parent = {**ROW, "msg_id": "m2", "parent_id": "m1", "reward": 1.0}, {**ROW, "msg_id": "m1"}
    for order in ([child, parent], [parent, child, parent, child]):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, order)))
        assert len(read_export(tmp_path / "rows.jsonl", config, model)) >= 2


REPLY = {"msg_id": "m1", "prompt_ids": [1], "reply_ids": [2], "logprobs": [-0.5]}
OTHER = {**REPLY, "msg_id": "m2", "reply_ids": [3], "state": "DISCARDED"}
QUARANTINED = {"reason": "quarantined: each trainer died in an update with it alone"}


def over(name: str) -> dict[str, list[dict[str, str]]]:
    return {"signals": [{"kind": "preferred_over", "text": name}]}


@pytest.mark.parametrize(
    ("other", "used", "unused"),
    [
        (OTHER, ["m2"], ()),
        ({**OTHER, "reason": "expired: nothing that is learned from was said in time"}, ["m2"], ()),
        ({**OTHER, **over("m1")}, [], ("preference_circle",)),
        ({**OTHER, **QUARANTINED}, [], ("preference_unknown",)),
        ({**OTHER, "logprobs": []}, [], ("preference_unknown",)),
        ({**OTHER, "prompt_ids": None, "reason": "erased"}, [], ("preference_unknown",)),
    ],
)
def test_a_discarded_reply_is_read_where_another_is_preferred_over_it_as_on_the_ledger(
    other, used, unused, tmp_path, model
):
    config = trainer_config(tmp_path, model, algorithm="dpo")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [other, {**REPLY, **over("m2")}])))
    (row,) = read_export(tmp_path / "rows.jsonl", config, model)
    assert (row.msg_id, [one.name for one in row.preferred_over], row.unused) == ("m1", used, unused)


def test_a_reply_whose_token_ids_the_model_lacks_is_refused_by_name_where_another_is_preferred_over_it(tmp_path, model):
    config = trainer_config(tmp_path, model, algorithm="dpo")
    other = {**OTHER, "reply_ids": [40_000]}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [other, {**REPLY, **over("m2")}])))
    read = read_export(tmp_path / "rows.jsonl", config, model)
    trainer = SimpleNamespace(_config=config, _learner=SimpleNamespace(vocabulary=208, context=50), _base_folder=model)
    with pytest.raises(StartupError, match="reply m2: the token id 40000 is outside of the model's vocabulary of 208"):
        OfflineTrainer._require_known(trainer, read)


def test_an_erasure_names_the_version_that_a_file_taught_to_prefer_another_reply(tmp_path, model, lives, capsys):
    prepare(tmp_path, model, algorithm="dpo")
    config = load_config(tmp_path / "flywheel.yaml")
    winner, loser = make_experiences(model, 2)
    loser = replace(loser, tokens=replace(loser.tokens, prompt_ids=winner.tokens.prompt_ids))
    with closing(open_ledger(tmp_path)) as ledger, ledger.write() as connection:
        transitions.record(connection, samples_of([winner, loser]))
        said = {"signals": [Signal("preferred_over", text=loser.msg_id)], "task_id": None, "run_id": None}
        learned = config.trainer.learns_from
        transitions.apply_feedback(connection, msg_ids=[winner.msg_id], rule=config.reward, learned=learned, **said)
    run_here(config, "export", "--out", str(tmp_path / "rows.jsonl"), "--tokens")
    train(lives, tmp_path, "--from", str(tmp_path / "rows.jsonl"))
    assert run_here(config, "erase", "--message", loser.msg_id) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 rows erased; they went into versions 1"
