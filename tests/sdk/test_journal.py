"""learn's journal over the real explorer: what was done is neither lost nor done again, wherever it was killed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import flywheel
import pytest
from flywheel.errors import JournalMismatch
from flywheel.journal import Journal, read_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sdk.conftest import TASKS, learn, rows, said
from tests.support.forms import FULL
from tests.support.processes import REPOSITORY
from tests.support.servers import RunningExplorer, make_config, publish, wait_until


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_journal_that_was_cut_anywhere_is_read(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder / "journal.jsonl", {"seed": 0}, resume=True)
    for number in range(5):
        journal.note({"kind": "ended", "place": f"ü#{number}", "outcome": "rewarded", "reward": 1.0, "feedback": []})
        journal.note({"kind": "sent", "place": f"ü#{number}"})
    journal.close()
    whole = (folder / "journal.jsonl").read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    (folder / "journal.jsonl").write_bytes(whole[:cut])
    again = Journal(folder / "journal.jsonl", {"seed": 0}, resume=True)
    lines = whole[:cut].decode(errors="replace").split("\n")[:-1]
    assert len(again.ended) == sum('"ended"' in line for line in lines)
    assert len(again.unsent) == len(again.ended) - sum('"sent"' in line for line in lines)
    again.note({"kind": "ended", "place": "last#0", "feedback": []})
    again.close()
    assert list(read_lines(folder / "journal.jsonl"))[-1]["place"] == "last#0"


def test_a_folder_in_which_another_process_learns_is_refused_until_that_has_ended(tmp_path):
    path = tmp_path / "journal.jsonl"
    program = "import pathlib, sys; from flywheel.journal import Journal\n"
    program += "Journal(pathlib.Path(sys.argv[1]), {}, True); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(path)]
    other = subprocess.Popen(command, cwd=REPOSITORY / "agent_sdk", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None and other.stdout is not None
    try:
        other.stdout.readline()
        with pytest.raises(JournalMismatch, match="in use by another learn"):
            Journal(path, {}, resume=True)
    finally:
        other.kill()
        other.communicate()
    Journal(path, {}, resume=True).close()


def test_a_folder_in_which_this_process_learns_is_refused_until_that_has_ended(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, {}, resume=True)
    for name in (path, tmp_path / ".." / tmp_path.name / "journal.jsonl"):
        with pytest.raises(JournalMismatch, match="in use by another learn"):
            Journal(name, {}, resume=True)
    journal.close()
    Journal(path, {}, resume=True).close()


def test_a_folder_whose_runs_another_server_has_is_refused(explorer, scripted_engine, tmp_path):
    publish(explorer, 0)
    assert learn(explorer, tmp_path, tasks=TASKS[:2]).rewarded == 2
    journal, report = tmp_path / "runs/journal.jsonl", tmp_path / "runs/report.json"
    before = journal.read_bytes(), report.read_bytes()
    emptied = RunningExplorer(make_config(tmp_path / "new", [scripted_engine.url])).wait_ready()
    try:
        publish(emptied, 0)
        with pytest.raises(flywheel.JournalMismatch, match=f"another server than {emptied.url}.*another folder"):
            learn(emptied, tmp_path, tasks=TASKS[:2])
        assert rows(emptied) == []
    finally:
        emptied.stop()
    assert report.read_bytes() == before[1] and journal.read_bytes().startswith(before[0])
    assert learn(explorer, tmp_path, tasks=TASKS[:2]).runs == 2


def test_kill_9_at_random_moments_counts_each_run_once_and_rewards_no_broken_run(explorer, tmp_path):
    kills = 50 if FULL else 3
    chance = random.Random(17)
    folder, tasks, runs = tmp_path / "runs", 12 * kills, 2
    code = [sys.executable, "-m", "tests.sdk.learn_program", explorer.url, str(folder), str(tasks), str(runs)]
    env = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'agent_sdk'}"}
    for _ in range(kills):
        before = journal_size(folder)
        process = subprocess.Popen(code, env=env, stdout=subprocess.DEVNULL, cwd=REPOSITORY)
        enough = before + chance.randrange(4000)
        wait_until(lambda: journal_size(folder) > enough or process.poll() is not None, 240)  # noqa: B023
        process.kill()
        process.wait()
    ended = subprocess.run(code, env=env, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.split() == [str(tasks * runs), "done"]
    episodes = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    assert len({episode["place"] for episode in episodes}) == len(episodes) == tasks * runs
    counted = {(episode["place"].rpartition("#")[0], episode["run_id"]) for episode in episodes}
    rewarded = Counter((row.task_id, row.run_id) for row in rows(explorer) if row.reward is not None)
    assert set(rewarded) == counted, "the rewarded runs are those of the report"
    assert {row.reward for row in rows(explorer)} == {1.0, None}
    assert {row.state for row in rows(explorer) if row.reward is not None} == {"READY"}, "each was committed"
    assert set(Counter(signal.msg_id for signal in said(explorer)).values()) == {1}, "each was said once"


def journal_size(folder: Path) -> int:
    journal = folder / "journal.jsonl"
    return journal.stat().st_size if journal.exists() else 0
