"""Import and archive: rows come back as they left, and nothing leaves the ledger before it stands in a file."""

from __future__ import annotations

import json
import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from sqlalchemy import select, update

from explorer_service.chat.conversation import read_prompt
from shared.config import RewardConfig
from shared.errors import ConfigError, StartupError
from shared.experience import Sampling, Tokens
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.prefix import load_tokens
from shared.ledger.queries import count_by_state, size_bytes
from shared.ledger.row_files import read_rows, replace_whole
from shared.ledger.tables import experiences, payloads, signals
from shared.reward import Signal
from tests.support.experiences import record_ready, rows
from tests.support.processes import run_here
from tests.support.samples import sample


def content(ledger: Ledger) -> list[tuple]:
    c = experiences.c
    columns = (c.msg_id, c.choice, c.version, c.reward, c.task_id, c.temperature, payloads.c.tokens)
    with ledger.read() as connection:
        return [tuple(row) for row in connection.execute(select(*columns).join(payloads).order_by(c.msg_id, c.choice))]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet"])
def test_rows_with_tokens_come_back_as_they_left(ledger, config, tmp_path: Path, name):
    record_ready(ledger, rows(30))
    before = content(ledger)
    run_here(config, "export", "--tokens", "--out", str(tmp_path / name))
    with ledger.write() as connection:
        for table in (signals, payloads, experiences):
            connection.execute(table.delete())
    assert run_here(config, "import", str(tmp_path / name), "--commit") == 0
    assert content(ledger) == before
    with ledger.read() as connection:
        assert count_by_state(connection)["READY"] == 30
    assert run_here(config, "import", str(tmp_path / name), "--commit") == 0, "again: all are known"
    assert content(ledger) == before


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.parquet"])
def test_what_was_said_and_how_turns_follow_each_other_comes_back_too(ledger, config, tmp_path: Path, name):
    messages = [{"role": "user", "content": "hello"}]
    prompt = np.arange(50, dtype=np.int32)
    for turn in range(3):
        reply = {"role": "assistant", "content": f"answer {turn}"}
        tokens = Tokens(prompt, np.array([7, 8], np.int32), np.array([-0.5, -0.25], np.float32))
        digest, extends = read_prompt(messages, None, None, None)
        texts = {"request": msgspec.json.encode({"messages": messages}), "reply": msgspec.json.encode(reply)}
        one = sample(f"m{turn}", tokens=tokens, exchange=digest.add_reply(reply), extends=extends, **texts)
        with ledger.write() as connection:
            transitions.record(connection, [one])
        messages = [*messages, reply, {"role": "user", "content": "go on"}]
        prompt = np.concatenate((tokens.prompt_ids, tokens.reply_ids, prompt[:9]))
    said = {
        "alice": [Signal("rating", text="up"), Signal("metric", value=0.25, name="speed")],
        "bob": [Signal("comment", text="why?"), Signal("correction", text="because")],
    }
    with ledger.write() as connection:
        for key_name, signals_of_key in said.items():
            about = {"task_id": None, "run_id": None, "signals": signals_of_key, "key_name": key_name}
            transitions.apply_feedback(connection, msg_ids=["m1"], rule=RewardConfig(), **about)
    before = story(ledger)
    assert len({row[1] for row in before[0]}) == 1
    run_here(config, "export", "--tokens", "--out", str(tmp_path / name))
    with ledger.write() as connection:
        for table in (signals, payloads, experiences):
            connection.execute(table.delete())
    assert run_here(config, "import", str(tmp_path / name)) == 0
    assert story(ledger) == before


def story(ledger: Ledger) -> tuple[list[tuple], list[tuple], list[list[int]]]:
    """How rows follow each other, what was said of them, and their whole prompts."""
    c, s = experiences.c, signals.c
    with ledger.read() as connection:
        linked = connection.execute(select(c.msg_id, c.conversation_id, c.parent_id, c.reward).order_by(c.id))
        said = connection.execute(select(s.msg_id, s.kind, s.name, s.value, s.text, s.key_name).order_by(s.id))
        ids = connection.execute(select(c.id).order_by(c.id)).scalars().all()
        prompts = [tokens.prompt_ids.tolist() for tokens in load_tokens(connection, ids).values()]
        return [tuple(row) for row in linked], [tuple(row) for row in said], prompts


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_what_was_said_of_a_run_and_all_of_sampling_come_back(ledger, config, tmp_path: Path, name):
    sampling = Sampling(0.7, 0.9, 20, 0.1, 1.1, 0.5, -0.5, masked=True)
    run = {"task_id": "t", "run_id": "0"}
    said: dict[str, Any] = {"rule": RewardConfig(), "key_name": "rater"}
    with ledger.write() as connection:
        transitions.record(connection, [replace(sample(f"m{n}", **run), sampling=sampling) for n in range(2)])
        reward, up = [Signal("reward", value=0.5)], [Signal("rating", text="up")]
        transitions.apply_feedback(connection, msg_ids=[], **run, signals=reward, **said)
        transitions.apply_feedback(connection, msg_ids=["m1"], task_id=None, run_id=None, signals=up, **said)

    def found() -> list[list[tuple]]:
        names = (*(field.name for field in fields(Sampling)), "reward", "turn_reward", "outcome", "teaches")
        rows = select(*(experiences.c[name] for name in names)).order_by(experiences.c.id)
        log = select(signals.c.msg_id, signals.c.kind, signals.c.scope).order_by(signals.c.msg_id, signals.c.id)
        with ledger.read() as connection:
            return [list(map(tuple, connection.execute(query))) for query in (rows, log)]

    before = found()
    assert before[0][1][-4:] == (1.0, 1.0, 0.5, True)
    run_here(config, "export", "--tokens", "--out", str(tmp_path / name))
    with ledger.write() as connection:
        for table in (signals, payloads, experiences):
            connection.execute(table.delete())
    assert run_here(config, "import", str(tmp_path / name), "--commit") == 0
    assert found() == before


def test_rows_that_cannot_be_learned_from_are_counted_and_the_others_taken(ledger, config, tmp_path: Path, capsys):
    good = {"prompt_ids": [1, 2], "reply_ids": [3], "logprobs": [-0.5], "reward": 1.0}
    lines = [
        good,
        {**good, "logprobs": []},
        {**good, "reply_ids": "x"},
        {**good, "reply_ids": [2**31]},
        {**good, "prompt_ids": [1, -2]},
        {**good, "prompt_ids": [1.5, 2]},
        {**good, "sampling": {"beams": 4}},
        {**good, "signals": [{"kind": "applause"}]},
        {"messages": [{"role": "user"}]},
        {"messages": ["hi"]},
        {},
    ]
    file = tmp_path / "mixed.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    assert run_here(config, "import", str(file)) == 0
    assert "1 imported, 0 known, 10 unusable" in capsys.readouterr().err
    file.write_text("not json")
    with pytest.raises(StartupError, match="not JSON"):
        run_here(config, "import", str(file))


def test_old_rows_move_into_files_and_back(ledger, config, tmp_path: Path):
    record_ready(ledger, rows(40))
    with ledger.write() as connection:
        old = experiences.c.id <= 25
        connection.execute(
            update(experiences).where(old).values(state="CONSUMED", teaches=0, consumed_version=3, created_at=1.0)
        )
    before = content(ledger)
    run_here(config, "archive", "--to", str(tmp_path / "archive"), "--older-than-days", "1")
    with ledger.read() as connection:
        assert count_by_state(connection) == {**dict.fromkeys(count_by_state(connection), 0), "READY": 15}
    (file,) = (tmp_path / "archive").iterdir()
    assert file.name == "rows-000000000001-000000000025.jsonl.gz"
    run_here(config, "import", str(file))
    assert content(ledger) == before


def test_a_ledger_that_is_too_large_loses_its_oldest_done_rows(ledger, config, tmp_path: Path):
    record_ready(ledger, rows(400))
    with ledger.write() as connection:
        connection.execute(update(experiences).where(experiences.c.id <= 300).values(state="CONSUMED", teaches=0))
    run_here(config, "archive", "--to", str(tmp_path / "archive"), "--keep-gb", "0")
    with ledger.read() as connection:
        left = sum(count_by_state(connection).values())
    assert left == 100, "what is still to be trained stays, however little room there is"
    with pytest.raises(ConfigError, match="--older-than-days"):
        run_here(config, "archive", "--to", str(tmp_path / "archive"))


def test_an_archive_that_left_the_rest_small_enough_moves_nothing_when_it_runs_again(ledger, config, tmp_path: Path):
    record_ready(ledger, rows(400))
    with ledger.write() as connection:
        connection.execute(update(experiences).values(state="CONSUMED", teaches=0))
        prompt = random.Random(1).randbytes(10_000).hex()
        connection.execute(update(payloads).values(request=msgspec.json.encode({"prompt": prompt})))
        half = f"{size_bytes(connection) / 2 / 1e9:.9f}"
    counts = []
    for _ in range(3):
        run_here(config, "archive", "--to", str(tmp_path / "archive"), "--keep-gb", half)
        with ledger.read() as connection:
            counts.append(sum(count_by_state(connection).values()))
    assert 180 < counts[0] < 220
    assert counts[0] - 20 < counts[2], "room that PostgreSQL keeps for later rows is no reason to move more"


def archived_names(folder: Path) -> list[str]:
    return [row["msg_id"] for file in sorted(folder.iterdir()) for row in read_rows(file)]


def test_an_archive_overwrites_no_file_when_numbers_of_rows_come_again(ledger, config, tmp_path: Path):
    for name in "ab":
        record_ready(ledger, rows(3, name=name))
        with ledger.write() as connection:
            connection.execute(update(experiences).values(state="CONSUMED", teaches=0))
        run_here(config, "archive", "--to", str(tmp_path / "archive"), "--older-than-days", "0")
        with ledger.write() as connection:
            assert sum(count_by_state(connection).values()) == 0
            if not ledger.is_sqlite:  # another ledger, archived into the same folder
                connection.exec_driver_sql("ALTER SEQUENCE experiences_id_seq RESTART")
    assert sorted(archived_names(tmp_path / "archive")) == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_of_archives_that_run_at_once_the_one_that_moved_a_row_has_it(ledger, config, tmp_path: Path, monkeypatch):
    record_ready(ledger, rows(2))
    with ledger.write() as connection:
        connection.execute(update(experiences).values(state="CONSUMED", teaches=0))
    command = ("archive", "--to", str(tmp_path / "archive"), "--older-than-days", "0")

    def written(file: Path, lines: Any) -> None:
        monkeypatch.setattr("shared.ledger.row_files.replace_whole", replace_whole)
        run_here(config, *command)  # another one begins, and ends
        replace_whole(file, lines)

    monkeypatch.setattr("shared.ledger.row_files.replace_whole", written)
    run_here(config, *command)
    archived = [row["msg_id"] for file in (tmp_path / "archive").iterdir() for row in read_rows(file)]
    assert sorted(archived) == ["m0", "m1"], "neither replaces what the other has moved"


@pytest.mark.parametrize("count", [0, 3])
def test_a_ledger_that_may_be_as_large_as_it_likes_loses_nothing(ledger, config, tmp_path: Path, count):
    record_ready(ledger, rows(count))
    with ledger.write() as connection:
        connection.execute(update(experiences).values(state="CONSUMED", teaches=0))
    assert run_here(config, "archive", "--to", str(tmp_path / "archive"), "--keep-gb", "1e300") == 0
    assert len(content(ledger)) == count


@pytest.mark.parametrize("bound", [("--older-than-days", "nan"), ("--older-than-days", "-5"), ("--keep-gb", "inf")])
def test_a_bound_that_is_no_amount_moves_nothing(ledger, config, tmp_path: Path, bound):
    record_ready(ledger, rows(3))
    with ledger.write() as connection:
        connection.execute(update(experiences).values(state="CONSUMED", teaches=0))
    with pytest.raises(ConfigError, match=f"{bound[0]} {bound[1]} is no such amount"):
        run_here(config, "archive", "--to", str(tmp_path / "archive"), f"{bound[0]}={bound[1]}")
    assert len(content(ledger)) == 3


def test_choices_of_one_message_go_and_come_each_for_itself(ledger, config, tmp_path: Path):
    several = [replace(row, msg_id="m", choice=number) for number, row in enumerate(rows(3))]
    record_ready(ledger, several)
    with ledger.write() as connection:
        connection.execute(update(experiences).where(experiences.c.choice == 0).values(state="CONSUMED", teaches=0))
    before = content(ledger)
    run_here(config, "archive", "--to", str(tmp_path / "archive"), "--older-than-days", "0")
    with ledger.read() as connection:
        said = set(connection.execute(select(signals.c.choice)).scalars())
    assert said == {1, 2}, "what was said of choices that stay, stays"
    (file,) = (tmp_path / "archive").iterdir()
    run_here(config, "import", str(file))
    assert content(ledger) == before


@pytest.mark.parametrize("another", [False, True], ids=["one archive", "two archives"])
def test_what_is_said_while_an_archive_is_written_is_not_lost(ledger, config, tmp_path: Path, monkeypatch, another):
    record_ready(ledger, rows(2))
    with ledger.write() as connection:
        connection.execute(update(experiences).values(state="CONSUMED", teaches=0))

    def written(file: Path, lines: Any) -> None:
        replace_whole(file, lines)
        if file == tmp_path / "a/rows-000000000001-000000000002.jsonl.gz" and not said:
            said.append(True)
            comment = {"task_id": None, "run_id": None, "signals": [Signal("comment", text="late")]}
            with ledger.write() as connection:
                transitions.apply_feedback(connection, msg_ids=["m1"], rule=RewardConfig(), **comment)
            if another:
                run_here(config, "archive", "--to", str(tmp_path / "b"), "--older-than-days", "0")

    said: list[bool] = []
    monkeypatch.setattr("shared.ledger.row_files.replace_whole", written)
    run_here(config, "archive", "--to", str(tmp_path / "a"), "--older-than-days", "0")
    with ledger.read() as connection:
        kept = set(connection.execute(select(signals.c.text)).scalars())
    files = sorted(tmp_path.glob("[ab]/*"))
    archived = {signal.get("text") for file in files for row in read_rows(file) for signal in row["signals"]}
    assert "late" in kept | archived
    for file in files:
        run_here(config, "import", str(file))
    with ledger.read() as connection:
        assert "late" in connection.execute(select(signals.c.text)).scalars().all()
