"""Archive and import: texts that are no conversation, links that texts alone do not show, and two imports at once."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import select

from explorer_service.chat.conversation import read_prompt
from services.samples import ImportedRow, store
from shared.config import RewardConfig
from shared.experience import Sample
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.row_files import read_rows, replace_whole
from shared.ledger.tables import experiences, payloads
from shared.reward import Signal
from tests.integration.test_import_again import ROW, columns, emptied
from tests.support.lessons import say
from tests.support.processes import run_here
from tests.support.samples import sample

ASKED = {"role": "user", "content": "hello"}


def turn(name: str, messages: list[Any], content: str, **fields: Any) -> Sample:
    """A chat without a task, as the explorer records it."""
    reply = {"role": "assistant", "content": content}
    digest, extends = read_prompt(messages, None, None, None)
    request = {"model": "agent", "messages": messages, **fields}
    texts = {"request": msgspec.json.encode(request), "reply": msgspec.json.encode(reply)}
    return sample(name, exchange=digest.add_reply(reply), extends=extends, **texts)


def texts_of(ledger: Ledger) -> dict[str, Any]:
    """Each row's request and reply, by message."""
    query = select(experiences.c.msg_id, payloads.c.request, payloads.c.reply).join(payloads)
    decode = msgspec.json.decode
    with ledger.read() as connection:
        return {
            name: [None if text is None else decode(text) for text in texts]
            for name, *texts in connection.execute(query)
        }


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_texts_come_back_those_of_plain_completions_and_other_fields_of_requests_too(
    ledger, config, tmp_path: Path, name
):
    plain = {"prompt": "Once upon", "model": "agent", "user": "u-1"}, {"content": " a time"}
    tools = [{"type": "function", "function": {"name": "look"}}]
    request, reply = (msgspec.json.encode(one) for one in plain)
    with ledger.write() as connection:
        transitions.record(connection, [sample("plain", request=request, reply=reply), sample("silent")])
        transitions.record(connection, [turn("chat", [ASKED], "hi", tools=tools, response_format={"type": "text"})])
    before = texts_of(ledger)
    run_here(config, "export", "--tokens", "--out", str(tmp_path / name))
    emptied(ledger)
    assert run_here(config, "import", str(tmp_path / name)) == 0
    assert texts_of(ledger) == before


def test_an_imported_turn_that_feedback_gave_a_task_still_follows_the_others(ledger, config, tmp_path: Path):
    messages: list[Any] = [ASKED]
    for number in range(3):
        with ledger.write() as connection:
            transitions.record(connection, [turn(f"m{number}", messages, f"answer {number}")])
        messages = [*messages, {"role": "assistant", "content": f"answer {number}"}, ASKED]
    assert say(ledger, "m1", Signal("reward", value=1.0), task_id="t", run_id="0") == "applied"
    names = ("msg_id", "task_id", "parent_id", "conversation_id")
    before = columns(ledger, *names)
    assert before[1][1:3] == ("t", "m0")
    run_here(config, "export", "--tokens", "--out", str(tmp_path / "rows.jsonl"))
    emptied(ledger)
    assert run_here(config, "import", str(tmp_path / "rows.jsonl")) == 0
    assert columns(ledger, *names) == before
    with ledger.write() as connection:
        transitions.record(connection, [turn("m3", messages, "answer 3")])
    assert columns(ledger, "parent_id")[-1] == ("m2",), "a live chat continues it"
    assert run_here(config, "erase", "--message", "m0") == 0
    assert {name: request for name, (request, _) in texts_of(ledger).items()} == dict.fromkeys(("m1", "m2", "m3"))


def test_messages_come_back_from_parquet_whole_and_texts_that_look_like_parts_as_texts(tmp_path: Path):
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    parts = [{"type": "text", "text": "hello"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "user", "content": json.dumps(parts)},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning": "first", "annotations": [{"a": 1}]},
        {"role": "tool", "content": '{"n": 1}', "tool_call_id": "call_1", "name": "look"},
        {"role": "assistant", "content": '[{"type": "a", "n": 1}]', "reasoning_content": "second"},
    ]
    replace_whole(tmp_path / "rows.parquet", [{"messages": messages}])
    (row,) = read_rows(tmp_path / "rows.parquet")
    assert row["messages"] == messages


def test_of_two_imports_at_once_each_row_is_recorded_by_one(ledger):
    given = {"rule": RewardConfig(), "learned": frozenset(("reward",)), "default_reward": None}
    rows = [ImportedRow(sample(f"m{number}"), [], None) for number in range(3)]
    stored: list[int] = []

    def other() -> None:
        with ledger.write() as connection:
            stored.append(store(connection, rows[::-1], **given))

    second = threading.Thread(target=other)
    with ledger.write() as connection:
        stored.append(store(connection, rows, **given))
        second.start()
        second.join(0.5)  # time to find none of the rows, if nothing makes it wait
    second.join(60)
    assert stored == [3, 0]


def test_a_row_with_more_signals_than_a_ledger_takes_is_left_out_and_the_others_are_not(
    ledger, config, tmp_path: Path, capsys
):
    many = [{"kind": "reward", "value": 1.0}] * 501
    lines = [{**ROW, "msg_id": "m0", "signals": many}, {**ROW, "msg_id": "m1"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert run_here(config, "import", str(tmp_path / "rows.jsonl")) == 0
    said = capsys.readouterr().err
    assert "1 imported, 0 known, 1 unusable" in said
    assert "it has 501 signals; a row may have 500" in said


def test_an_imported_row_without_a_stored_parent_is_linked_by_its_messages(ledger, config, tmp_path: Path):
    answer = {"role": "assistant", "content": "hi"}
    with ledger.write() as connection:
        transitions.record(connection, [replace(turn("m0", [ASKED], "hi"), key_name=None)])
    row = {**ROW, "msg_id": "m1", "parent_id": "lost", "messages": [ASKED, answer, ASKED, answer]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert run_here(config, "import", str(tmp_path / "rows.jsonl")) == 0
    assert columns(ledger, "msg_id", "parent_id")[1] == ("m1", "m0")


def test_what_a_killed_archive_left_goes_with_the_next_one(ledger, config, tmp_path: Path):
    with ledger.write() as connection:
        transitions.record(connection, [sample("m0", quarantine="slow")])
    folder = tmp_path / "archive"
    folder.mkdir()
    killed = "import os; from pathlib import Path; from shared.ledger.row_files import *;"
    killed += f"file = Path({str(folder)!r}) / 'rows-000000000001-000000000001.jsonl.gz'; file.touch();"
    killed += "replace_whole(file, (os.kill(os.getpid(), 9) for _ in range(1)))"
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -9
    assert len(list(folder.iterdir())) == 2
    run_here(config, "archive", "--to", str(folder), "--older-than-days", "0")
    (file,) = folder.iterdir()
    assert [row["msg_id"] for row in read_rows(file)] == ["m0"]
