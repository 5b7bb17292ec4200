"""Files that somebody else wrote: what is no row is counted with its reason, what is no file is one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from shared.errors import ConfigError, StartupError
from shared.ledger.connect import Ledger
from shared.ledger.queries import count_by_state
from shared.ledger.tables import experiences
from tests.support.forms import one_database
from tests.support.processes import run_here
from tests.support.servers import make_config
from trainer_service.export import read_export

pytestmark = one_database
GOOD: dict[str, Any] = {"msg_id": "good", "prompt_ids": [1, 2], "reply_ids": [3], "logprobs": [-0.5], "reward": 1.0}
SIGNALS = [
    ({"kind": "reward"}, "a reward without a finite number"),
    ({"kind": "metric", "value": 1}, "a metric without a name"),
    ({"kind": "rating", "text": "sideways"}, "a rating that is neither up nor down"),
    ({"kind": "comment"}, "a comment without a text"),
    ({"kind": "correction", "text": "a\x00b"}, "NUL in a correction"),
    ({"kind": "metric", "value": 1, "name": "n" * 201}, "name of a metric"),
]
BAD = [
    ({"task_id": {"a": 1}}, "task_id is no text of at most 400 characters"),
    ({"task_id": "\U00020000" * 400}, "task_id has more than 1200 bytes in UTF-8"),
    ({"run_id": "a\x00b"}, "run_id is no text of at most 400 characters without NUL"),
    ({"msg_id": "m" * 201}, "msg_id is no text of at most 200 characters"),
    ({"finish_reason": []}, "finish_reason is no text"),
    ({"conversation_id": ["c"]}, "conversation_id is no text"),
    ({"choice": 2**70}, "choice is no number of a choice"),
    ({"choice": -1}, "choice is no number of a choice"),
    ({"version": "new"}, "version is no number of a version"),
    ({"created_at": "yesterday"}, "created_at is no time in Unix seconds"),
    ({"reward": "[/b]"}, "reward is no finite number"),
    ({"reward": True}, "reward is no finite number"),
    ({"messages": "hello"}, "messages is no list of messages"),
    ({"tools": "[{"}, "tools is no list"),
    *(({name: [GOOD[name]]}, "lists within a list") for name in ("prompt_ids", "reply_ids", "logprobs")),
    ({"logprobs": None}, "logprobs is no list, and a row with prompt_ids needs one; add it, or give messages alone"),
    *(({"reward": None, "signals": [signal]}, said) for signal, said in SIGNALS),
]


def stored(config) -> int:
    ledger = Ledger.open(config.ledger_url)
    with ledger.read() as connection:
        rows = sum(count_by_state(connection).values())
    ledger.close()
    return rows


def test_each_bad_row_is_left_out_with_its_reason_and_the_good_one_stored(config, tmp_path: Path, capsys):
    bad = [{**GOOD, "msg_id": f"bad{number}", **wrong} for number, (wrong, _) in enumerate(BAD)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, [*bad, GOOD, {**GOOD, "msg_id": "far", "reward": 1e300}])))
    assert run_here(config, "import", str(file), "--commit") == 0
    said = capsys.readouterr().err
    assert f"1 imported, 0 known, {len(BAD) + 1} unusable" in said
    for _, reason in BAD:
        assert reason in said.replace("\n", " ")
    assert "reward 1e+300 is outside of reward.accept" in said
    assert stored(config) == 1


@pytest.mark.parametrize("wrong", [wrong for wrong, _ in BAD[:-1]])
def test_training_on_a_file_leaves_the_same_rows_out(wrong, tmp_path: Path, model):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, [{**GOOD, "msg_id": "bad", **wrong}, GOOD])))
    config = make_config(tmp_path, ["http://127.0.0.1:1"])
    kept = {row.msg_id for row in read_export(file, config, model)}
    assert kept == ({"good", "bad"} if {"messages", "tools"} & wrong.keys() else {"good"})


def test_a_top_k_that_means_all_tokens_is_stored_as_that_of_a_chat(config, tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    rows = [{**GOOD, "msg_id": f"m{top_k}", "sampling": {"top_k": top_k}} for top_k in (-1, 20, 10**10)]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert run_here(config, "import", str(file)) == 0
    ledger = Ledger.open(config.ledger_url)
    with ledger.read() as connection:
        stored_k = connection.execute(select(experiences.c.top_k).order_by(experiences.c.id)).scalars().all()
    ledger.close()
    assert stored_k == [0, 20, 2**31 - 1]


def test_numbers_that_are_not_finite_come_in_by_no_parquet_file(config, tmp_path: Path, capsys):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{**GOOD, "msg_id": f"{value}", "reward": value} for value in (float("nan"), float("inf"), 1.0)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert run_here(config, "import", str(tmp_path / "rows.parquet")) == 0
    assert "1 imported, 0 known, 2 unusable" in capsys.readouterr().err


@pytest.mark.parametrize("reward", ["nan", "inf", "1000"])
def test_a_reward_for_rows_without_one_is_such_as_callers_may_send(config, tmp_path: Path, reward):
    (tmp_path / "rows.jsonl").write_text(json.dumps(GOOD))
    with pytest.raises(ConfigError, match=f"--reward {reward} is .*reward.accept"):
        run_here(config, "import", str(tmp_path / "rows.jsonl"), "--reward", reward)


def files() -> dict[str, tuple[bytes, str]]:
    line = json.dumps(GOOD).encode()
    packed = gzip.compress(b"\n".join(line.replace(b"good", b"%d" % number) for number in range(2000)))
    return {
        "cut.jsonl.gz": (packed[: len(packed) // 2], "cut.jsonl.gz cannot be read: it is cut off or damaged"),
        "damaged.jsonl.gz": (packed[:200] + b"\xff" * 20 + packed[220:], "damaged"),
        "other.parquet": (b"this is no Parquet file", "other.parquet cannot be read as Parquet"),
        "empty.parquet": (b"", "empty.parquet cannot be read as Parquet"),
        "latin.jsonl": (line + b'\n{"a": "caf\xe9"}\n', "latin.jsonl, line 2: not JSON in UTF-8"),
        "deep.jsonl": (b"[" * 100_000, "deep.jsonl, line 1: not JSON in UTF-8"),
        "nan.jsonl": (b'{"reward": NaN}', "line 1: not JSON in UTF-8 .*; NaN and Infinity are not JSON, write null"),
        "list.jsonl": (b"[]", "list.jsonl, line 1: not a JSON object"),
        "empty.jsonl": (b"\n", "empty.jsonl holds no rows"),
    }


@pytest.mark.parametrize("name", files())
def test_a_file_that_cannot_be_read_is_one_line(config, tmp_path: Path, name):
    content, said = files()[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StartupError, match=said):
        run_here(config, "import", str(tmp_path / name))


@pytest.mark.parametrize("name", [*files(), "missing.jsonl"])
def test_a_file_whose_beginning_cannot_be_read_leaves_no_new_ledger(tmp_path: Path, name):
    config, file = make_config(tmp_path / "root", ["http://127.0.0.1:1"]), tmp_path / name
    if name in files():
        file.write_bytes(files()[name][0])
    with pytest.raises(StartupError, match=name):
        run_here(config, "import", str(file))
    assert (config.root / "ledger.sqlite3").exists() == (name == "cut.jsonl.gz"), "whose first rows are stored"


def test_without_an_engine_for_rows_of_messages_a_remedy_is_named(config, tmp_path: Path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}))
    with pytest.raises(StartupError, match=r"need an engine: .*; start `flywheel up` or `flywheel engine`"):
        run_here(config, "import", str(tmp_path / "rows.jsonl"))


def test_a_byte_order_mark_is_no_part_of_the_first_row(config, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(GOOD), encoding="utf-8-sig")
    assert run_here(config, "import", str(tmp_path / "rows.jsonl")) == 0
    assert stored(config) == 1


@pytest.mark.parametrize("messages", ["hello", ["hello"]])
def test_messages_of_another_shape_in_parquet_are_unusable(config, tmp_path: Path, messages, capsys):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([{"messages": messages}]), tmp_path / "rows.parquet")
    assert run_here(config, "import", str(tmp_path / "rows.parquet")) == 1
    assert "messages is no list of messages" in capsys.readouterr().err
