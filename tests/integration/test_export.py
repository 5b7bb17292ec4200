"""Export: the conversations as they were, in the chat format, whole or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import ConfigError, StartupError
from shared.ledger.row_files import replace_whole
from tests.support.processes import run_here


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
    assert run_here(talked.config, "export", "--out", str(tmp_path / "out.jsonl")) == 0
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

    run_here(talked.config, "export", "--out", str(tmp_path / "out.parquet"))
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["reward"] for row in rows] == [1.0, 0.0, None]
    assert [message["content"] for message in rows[0]["messages"]] == ["hi", "answer 0 of start"]
    assert json.loads(rows[2]["tools"])[0]["function"]["name"] == "look"


def test_a_slice_is_chosen_by_reward_task_and_state(talked, tmp_path: Path):
    def count(*chosen: str) -> int:
        run_here(talked.config, "export", "--out", str(tmp_path / "out.jsonl"), *chosen)
        return len((tmp_path / "out.jsonl").read_text().splitlines())

    assert count("--min-reward", "0.5") == 1
    assert count("--task", "t1") == 1
    assert count("--state", "RECORDED") == 3
    assert count("--state", "CONSUMED") == 0


def test_two_exports_to_one_file_do_not_mix(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    again = [sys.executable, "-c", "import sys; from pathlib import Path; from shared.ledger.row_files import *;"]
    again[-1] += f"replace_whole(Path({str(file)!r}), [{{'row': n}} for n in range(3)])"

    def slowly():
        yield {"row": "mine"}
        subprocess.run(again, check=True)
        yield {"row": "mine"}

    replace_whole(file, slowly())
    assert [json.loads(line)["row"] for line in file.read_text().splitlines()] == ["mine"] * 2
    assert list(tmp_path.iterdir()) == [file]


def test_what_a_killed_export_left_goes_with_the_next_one_to_that_file(tmp_path: Path):
    file, other = tmp_path / "rows.jsonl", tmp_path / ".part-of-somebody-else-rows.jsonl"
    other.touch()
    killed = "import os; from pathlib import Path; from shared.ledger.row_files import *;"
    killed += f"replace_whole(Path({str(file)!r}), (os.kill(os.getpid(), 9) for _ in range(1)))"
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -9
    assert len(list(tmp_path.iterdir())) == 2
    replace_whole(file, [{"row": 1}])
    assert sorted(tmp_path.iterdir()) == sorted([file, other])


def test_what_cannot_be_written_is_said_and_leaves_nothing_behind(talked, tmp_path: Path):
    with pytest.raises(StartupError, match="must end in"):
        run_here(talked.config, "export", "--out", str(tmp_path / "out.csv"))
    with pytest.raises(StartupError, match="cannot be written"):
        run_here(talked.config, "export", "--out", str(tmp_path / "no" / "out.jsonl"))
    with pytest.raises(ConfigError, match="choose one of"):
        run_here(talked.config, "export", "--out", str(tmp_path / "out.jsonl"), "--state", "nonsense")
    assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob(".*part"))
