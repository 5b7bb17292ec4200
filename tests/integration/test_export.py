"""Export: the conversations as they were, in the chat format, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.transfer import export
from shared.errors import ConfigError, StartupError

EVERYTHING = {"state": None, "min_reward": None, "task_id": None}


@pytest.fixture
def talked(explorer):
    """Three chats: one rewarded well, one badly, one streamed and not at all; and a plain completion."""
    ids = [explorer.chat(metadata={"task_id": f"t{n}"}).json()["id"] for n in range(2)]
    for number, name in enumerate(ids):
        explorer.http.post("/feedback", json={"msg_ids": [name], "reward": 1.0 - number})
    explorer.chat(stream=True, tools=[{"type": "function", "function": {"name": "look"}}])
    explorer.http.post("/v1/completions", json={"prompt": "x"})
    return explorer


def test_jsonl_holds_each_conversation_with_its_reward(talked, tmp_path: Path):
    assert export(talked.config, tmp_path / "out.jsonl", **EVERYTHING) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [1.0, 0.0, None]
    assert rows[0]["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "answer 0 of start"},
    ]
    assert rows[2]["messages"][-1] == {"role": "assistant", "content": "t11t12t13"}
    assert rows[2]["tools"][0]["function"]["name"] == "look"


def test_parquet_holds_the_same(talked, tmp_path: Path):
    import pyarrow.parquet as pq

    export(talked.config, tmp_path / "out.parquet", **EVERYTHING)
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["reward"] for row in rows] == [1.0, 0.0, None]
    assert [message["content"] for message in rows[0]["messages"]] == ["hi", "answer 0 of start"]
    assert json.loads(rows[2]["tools"])[0]["function"]["name"] == "look"


def test_a_slice_is_chosen_by_reward_task_and_state(talked, tmp_path: Path):
    def count(**chosen: object) -> int:
        export(talked.config, tmp_path / "out.jsonl", **{**EVERYTHING, **chosen})
        return len((tmp_path / "out.jsonl").read_text().splitlines())

    assert [count(min_reward=0.5), count(task_id="t1"), count(state="RECORDED"), count(state="CONSUMED")] == [
        1,
        1,
        3,
        0,
    ]


def test_what_cannot_be_written_is_said_and_leaves_nothing_behind(talked, tmp_path: Path):
    with pytest.raises(StartupError, match="must end in"):
        export(talked.config, tmp_path / "out.csv", **EVERYTHING)
    with pytest.raises(StartupError, match="cannot be written"):
        export(talked.config, tmp_path / "no" / "out.jsonl", **EVERYTHING)
    with pytest.raises(ConfigError, match="choose one of"):
        export(talked.config, tmp_path / "out.jsonl", **{**EVERYTHING, "state": "nonsense"})
    assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob(".*part"))
