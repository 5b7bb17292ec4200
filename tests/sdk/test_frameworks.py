"""Each framework's own agent inside runs: every chat is attributed, ids are known, and rewards reach their rows."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.sdk.conftest import rows
from tests.sdk.frameworks import CLIENTS, FRAMEWORKS, run_framework, run_program
from tests.support.processes import REPOSITORY


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_runs_of_a_framework_do_not_mix(explorer, framework):
    found = run_framework(framework, explorer.url, 8)
    assert len(found) == 8
    recorded = rows(explorer)
    assert {(row.task_id, row.msg_id) for row in recorded} == {
        (task, one) for task, ids in found.items() for one in ids
    }
    assert all(row.reward == int(row.task_id.rpartition("-")[2]) for row in recorded)


def test_a_node_program_belongs_to_the_run_of_its_environment(explorer, client):
    with client.run("node / task", "0") as run:
        env = {**os.environ, **run.env()}
        program = [CLIENTS / "bin/node", REPOSITORY / "tests/clients/openai_node.mjs", env["OPENAI_BASE_URL"], "2"]
        subprocess.run(program, env=env, cwd=REPOSITORY / "tests/clients", check=True, timeout=240, capture_output=True)
        run.reward(0.5)
    assert {(row.task_id, row.run_id, row.reward) for row in rows(explorer)} == {("node / task", "0", 0.5)}


def test_guard_reads_the_flags_of_real_frameworks_and_a_shadow_run_writes_nothing():
    """Of each: what its flags say, what a shadow run met, how often it ran there and outside, and what was recorded."""
    found = run_program("guard_program.py")
    assert len(found) == 10
    said = [{"order": "A1"}]
    for name, what in found.items():
        assert what == ([True, "ran", 1, 1, said] if name.endswith("_reads") else [False, "refused", 0, 1, said]), name
