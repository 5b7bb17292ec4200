"""Export and import: whose a row is, how turns are linked and what was said of a whole come back, and nothing twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import select

from explorer_service.chat.conversation import read_prompt
from explorer_service.feedback import parse_feedback
from shared.config import Config, RewardConfig
from shared.errors import StartupError
from shared.experience import Tokens, trajectory_key
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.given import signals_of
from shared.ledger.queries import count_by_state
from shared.ledger.row_files import read_rows, replace_whole
from shared.ledger.tables import experiences, payloads, signals
from shared.reward import Signal
from shared.tokenizer import tokenizer_digest
from tests.support.lessons import record, say
from tests.support.processes import run_here
from tests.support.samples import sample
from tests.support.servers import make_config
from trainer_service.export import read_export

ROW = {"prompt_ids": [1, 2], "reply_ids": [3], "logprobs": [-0.5]}


def emptied(ledger: Ledger) -> None:
    with ledger.write() as connection:
        for table in (signals, payloads, experiences):
            connection.execute(table.delete())


def columns(ledger: Ledger, *names: str) -> list[tuple]:
    query = select(*(experiences.c[name] for name in names)).order_by(experiences.c.id)
    with ledger.read() as connection:
        return [tuple(row) for row in connection.execute(query)]


def with_tokenizer(root: Path, token: str) -> tuple[Config, str]:
    """A root folder whose version 0 has a tokenizer of one token, and the tokenizer's digest."""
    base = root / "versions/v000000"
    base.mkdir(parents=True)
    (base / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {token: 1}}, "added_tokens": []}))
    return make_config(root, ["http://127.0.0.1:1"]), str(tokenizer_digest(base))


def archived(config: Config, folder: Path) -> Path:
    """An archive of one discarded row."""
    ledger = Ledger.open(config.ledger_url)
    with ledger.write() as connection:
        transitions.record(connection, [sample("m0", quarantine="slow")])
    ledger.close()
    run_here(config, "archive", "--to", str(folder), "--older-than-days", "0")
    (file,) = folder.iterdir()
    return file


def test_rows_of_another_tokenizer_are_refused_and_those_of_the_same_one_come_back(tmp_path: Path):
    ours, our_digest = with_tokenizer(tmp_path / "ours", "a")
    other, other_digest = with_tokenizer(tmp_path / "other", "b")
    file = archived(ours, tmp_path / "archive")
    Ledger.open(other.ledger_url).close()
    with pytest.raises(StartupError, match=f"m0.*: its tokens are of the tokenizer {our_digest}.* has {other_digest};"):
        run_here(other, "import", str(file))
    assert run_here(ours, "import", str(file)) == 0


def test_rows_come_in_where_one_of_the_two_tokenizers_is_not_known(config, tmp_path: Path):
    ours, digest = with_tokenizer(tmp_path / "ours", "a")
    lines = [{**ROW, "msg_id": "m0", "tokenizer": None}, {**ROW, "msg_id": "m1"}]
    (tmp_path / "silent.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "known.jsonl").write_text(json.dumps({**ROW, "tokenizer": digest}))
    assert run_here(ours, "import", str(tmp_path / "silent.jsonl")) == 0
    assert run_here(config, "import", str(tmp_path / "known.jsonl")) == 0, "no model's folder is here"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_rows_come_back_to_their_key_and_its_group_and_are_erased_by_it(ledger, config, tmp_path: Path, name):
    with ledger.write() as connection:
        transitions.record(connection, [replace(sample("m0"), key_name="shop", key_group="shops"), sample("m1")])
    before = columns(ledger, "msg_id", "key_name", "key_group")
    run_here(config, "export", "--tokens", "--out", str(tmp_path / name))
    emptied(ledger)
    assert run_here(config, "import", str(tmp_path / name)) == 0
    assert columns(ledger, "msg_id", "key_name", "key_group") == before
    assert run_here(config, "erase", "--key", "shop") == 0


def test_a_row_comes_back_with_an_empty_comment_and_a_metric_whose_name_is_empty(ledger, config, tmp_path: Path):
    body = b'{"msg_ids": ["m"], "rating": "up", "comment": "", "correction": "", "metrics": {"": 1}}'
    _, said = parse_feedback(body, RewardConfig())
    record(ledger, "m")
    assert say(ledger, "m", *said) == "applied"
    run_here(config, "export", "--tokens", "--out", str(tmp_path / "rows.jsonl"))
    emptied(ledger)
    assert run_here(config, "import", str(tmp_path / "rows.jsonl")) == 0
    with ledger.read() as connection:
        found = connection.execute(select(signals.c.kind, signals.c.name, signals.c.text).order_by(signals.c.id)).all()
    assert [tuple(row) for row in found] == [(one.kind, one.name, one.text) for one in said]


def test_a_chat_with_damaged_tokens_comes_back_from_an_archive_neither_as_a_row_nor_as_a_demonstration(
    ledger, config, tmp_path: Path, capsys
):
    damaged = Tokens(np.array([1], np.int32), np.array([2, 3], np.int32), np.array([-0.5], np.float32))
    texts = {"request": b'{"messages": []}', "reply": b'{"content": "hello"}'}
    with ledger.write() as connection:
        transitions.record(connection, [sample("m", tokens=damaged, quarantine="damaged", **texts)])
    run_here(config, "archive", "--to", str(tmp_path / "archive"), "--older-than-days", "0")
    (file,) = (tmp_path / "archive").iterdir()
    assert [row["messages"][0]["content"] for row in read_rows(file)] == ["hello"]
    assert run_here(config, "import", str(file)) == 1
    assert "0 imported, 0 known, 1 unusable" in capsys.readouterr().err


def test_an_archive_holds_each_row_that_left_the_ledger_and_an_erased_one_stays(ledger, config, tmp_path: Path):
    damaged = Tokens(np.array([1], np.int32), np.array([2, 3], np.int32), np.array([-0.5], np.float32))
    with ledger.write() as connection:
        transitions.record(connection, [sample("damaged", tokens=damaged, quarantine="damaged"), sample("erased")])
        transitions.erase(connection, msg_id="erased")
    run_here(config, "archive", "--to", str(tmp_path / "archive"), "--older-than-days", "0")
    assert columns(ledger, "msg_id", "reason") == [("erased", "erased")]
    (file,) = (tmp_path / "archive").iterdir()
    assert [(row["msg_id"], row["prompt_ids"]) for row in read_rows(file)] == [("damaged", [])]


def test_a_row_whose_message_id_ends_in_a_number_is_reached_by_that_id(ledger, config, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({**ROW, "msg_id": "gsm8k#17"}))
    assert run_here(config, "import", str(tmp_path / "rows.jsonl")) == 0
    assert say(ledger, "gsm8k#17", Signal("reward", value=1.0)) == "applied"


def test_training_on_a_file_keeps_runs_of_one_name_apart_by_group(tmp_path: Path, model):
    run, groups = {**ROW, "reward": 1.0, "task_id": "t", "run_id": "0"}, [None, "shops", "inns"]
    lines = [{**run, "msg_id": f"m{number}", "key_group": group} for number, group in enumerate(groups)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    kept = read_export(tmp_path / "rows.jsonl", make_config(tmp_path, ["http://127.0.0.1:1"]), model)
    assert [trajectory_key(row) for row in kept] == [(None, "t", "0"), ("shops", "t", "0"), ("inns", "t", "0")]


def test_a_live_turn_continues_a_conversation_that_was_imported_under_its_key(ledger, config, tmp_path: Path):
    asked, answer = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes?"}
    row = {**ROW, "msg_id": "m0", "messages": [asked, answer], "key_name": "shop"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert run_here(config, "import", str(tmp_path / "rows.jsonl")) == 0
    _, extends = read_prompt([asked, answer, asked], "shop", None, None)
    with ledger.write() as connection:
        transitions.record(connection, [replace(sample("m1"), key_name="shop", extends=extends)])
    assert columns(ledger, "msg_id", "parent_id")[1] == ("m1", "m0")


def test_rows_without_a_message_id_are_imported_once_however_often_the_file_is(ledger, config, tmp_path: Path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, [ROW, {**ROW, "reward": 1.0}, ROW])))
    assert run_here(config, "import", str(file)) == 0
    assert "3 imported, 0 known, 0 unusable" in capsys.readouterr().err, "the file holds one of them twice"
    assert run_here(config, "import", str(file)) == 0
    assert "0 imported, 3 known, 0 unusable" in capsys.readouterr().err
    with ledger.read() as connection:
        assert sum(count_by_state(connection).values()) == 3


def test_turns_whose_texts_are_not_stored_are_linked_again(ledger, config, tmp_path: Path):
    prompt = np.arange(50, dtype=np.int32)
    exchanges = [b"one", b"two", b"three"]
    for turn, exchange in enumerate(exchanges):
        tokens = Tokens(prompt, np.array([7, 8], np.int32), np.array([-0.5, -0.25], np.float32))
        extends = tuple(exchanges[max(0, turn - 1) : turn])
        with ledger.write() as connection:
            transitions.record(connection, [sample(f"m{turn}", tokens=tokens, exchange=exchange, extends=extends)])
        prompt = np.concatenate((tokens.prompt_ids, tokens.reply_ids, prompt[:9]))
    before = columns(ledger, "msg_id", "parent_id", "conversation_id")
    assert before == [("m0", None, "m0"), ("m1", "m0", "m0"), ("m2", "m1", "m0")]
    run_here(config, "export", "--tokens", "--out", str(tmp_path / "rows.jsonl"))
    emptied(ledger)
    assert run_here(config, "import", str(tmp_path / "rows.jsonl")) == 0
    assert columns(ledger, "msg_id", "parent_id", "conversation_id") == before


def test_texts_of_a_file_are_not_stored_where_none_are(tmp_path: Path):
    quiet = make_config(tmp_path / "root", ["http://127.0.0.1:1"], store_text=False)
    said = [{"role": "user", "content": "a secret"}, {"role": "assistant", "content": "yes?"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({**ROW, "messages": said}))
    Ledger.open(quiet.ledger_url).close()
    assert run_here(quiet, "import", str(tmp_path / "rows.jsonl")) == 0
    ledger = Ledger.open(quiet.ledger_url)
    with ledger.read() as connection:
        assert connection.execute(select(payloads.c.request, payloads.c.reply)).all() == [(None, None)]
    ledger.close()


def test_the_outcome_of_a_run_is_no_reward_of_each_turn_in_an_export_without_signals():
    told = {"reward": 1.0, "turn_reward": None, "outcome": 1.0, "task_id": "t", "run_id": "0"}
    assert signals_of(told, RewardConfig()) == [Signal("reward", 1.0, scope="run")]
    both = {"reward": 0.25, "turn_reward": 0.25, "outcome": 1.0, "conversation_id": "m0"}
    said = [Signal("reward", 1.0, scope="conversation"), Signal("reward", 0.25)]
    assert signals_of(both, RewardConfig()) == said, "what was said last is last"
    assert signals_of({"reward": 0.5}, RewardConfig()) == [Signal("reward", 0.5)]


def test_parts_of_a_message_come_back_from_parquet_as_parts_and_texts_as_texts(tmp_path: Path):
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "[1]"}]
    told = ["plain", "[1, 2]", '[{"a": 1}]', "[]", "{}", '"quoted"']
    messages = [{"role": "user", "content": content} for content in (parts, *told)]
    replace_whole(tmp_path / "rows.parquet", [{"messages": messages}])
    (row,) = read_rows(tmp_path / "rows.parquet")
    assert row["messages"] == messages
