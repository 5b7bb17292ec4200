"""Files of tasks and of options: what a spreadsheet writes is read, and what cannot be read is named."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import flywheel
import numpy as np
import pytest
from flywheel.config import EarlyStop, LearnConfig
from flywheel.errors import ConfigError
from flywheel.tasks import load_tasks

from tests.support.processes import REPOSITORY


@pytest.mark.parametrize(("name", "text"), [("t.csv", "question,answer\n1+1,2\n"), ("t.jsonl", '{"q": "1+1"}\n')])
def test_a_file_may_begin_with_a_byte_order_mark(tmp_path, name, text):
    plain, marked = tmp_path / name, tmp_path / f"marked-{name}"
    plain.write_text(text, encoding="utf-8")
    marked.write_text(text, encoding="utf-8-sig")
    assert load_tasks(marked) == load_tasks(plain)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("t.csv", b"question,answer\n1+1,2\n1+2,3,4\n", "line 3 has more cells than the first"),
        ("t.csv", b"question\n\xff\n", "is not UTF-8"),
        ("t.jsonl", b'{"question": "\xff"}\n', "is not UTF-8"),
        ("t.csv", b"question\n" + b"x" * 200_000, "after line 1: field larger than field limit"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, reason):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as raised:
        load_tasks(file)
    assert str(file) in str(raised.value)


NAMES = """
from flywheel.tasks import load_tasks
class Picture: pass
rows = [{"a": {"x", "y", "z", "w"}}, {"a": [frozenset({1, 2, "b"}), {("k", 1)}]}, {"a": Picture()}, {"a": Picture()}]
print([task.digest for task in load_tasks(rows)])
"""


def test_tasks_have_the_same_names_in_each_process():
    found = [
        subprocess.run(
            [sys.executable, "-c", "PADDING = [object()] * 999\n" * (seed == "2") + NAMES],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(REPOSITORY / "agent_sdk")},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2", "3")
    ]
    assert len(set(found)) == 1


def test_tasks_with_other_sets_have_other_names():
    rows = [{"a": {"x", "y"}}, {"a": {"x", "z"}}, {"a": ["x", "y"]}]
    assert len({task.digest.partition(".")[0] for task in load_tasks(rows)}) == 3


@pytest.mark.parametrize(
    ("tasks", "reason"),
    [
        ([{1: "a", "b": 2}], "task 0 .* texts as keys"),
        ([{"a": 1}, {"b": {(1, 2): 3}}], "task 1 .* texts as keys"),
        (None, "tasks=None"),
        (5, "tasks=5"),
    ],
)
def test_tasks_that_cannot_be_named_are_refused(tasks, reason):
    with pytest.raises(ConfigError, match=reason):
        load_tasks(tasks)


def test_a_comparison_refuses_them_as_an_evaluation_does():
    with pytest.raises(ConfigError, match="tasks=5"):
        flywheel.compare(lambda task: 1.0, 5, 0, 1, url="http://127.0.0.1:1")


@pytest.mark.parametrize("content", [None, b"{", b"[1]", b"\xff", b'{"stop": {"patience": 1, "no": 2}}'])
def test_options_that_cannot_be_read_are_named(tmp_path, content):
    file = tmp_path / "options.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"options\.json"):
        LearnConfig.load(file)


@pytest.mark.parametrize(
    "option",
    [
        {"runs_per_task": "8"}, {"epochs": 1.5}, {"max_failed_share": "0.2"}, {"retries": -1}, {"seconds": "60"},
        {"timeout_s": "600"}, {"max_ready_rows": [8]}, {"timeout_s": None}, {"patience_s": None}, {"name": 5},
        {"stop": 3}, {"eval_params": None}, {"params": 5}, {"seconds": math.nan},
    ],
)  # fmt: skip
def test_an_option_of_a_wrong_type_is_named(tmp_path, option):
    file = tmp_path / "options.json"
    file.write_text(json.dumps(option))
    with pytest.raises(ConfigError, match=next(iter(option))):
        LearnConfig.load(file)


def test_a_patience_of_no_evaluation_is_refused():
    with pytest.raises(ConfigError, match="patience=0"):
        EarlyStop(patience=0).says_stop([0.5])


def test_an_option_may_be_a_number_of_numpy():
    found = LearnConfig(at_once=np.int64(4), max_failed_share=np.float32(0.5), stop=EarlyStop(patience=np.int64(2)))
    assert (found.at_once, found.max_failed_share) == (4, 0.5)
