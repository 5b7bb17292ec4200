"""Forked processes have no threads of their parent's, and must not use its connections."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.sdk import forking_program
from tests.sdk.conftest import rows
from tests.support.processes import REPOSITORY


def test_a_forked_process_shadows_collects_and_rewards_by_itself(explorer, tmp_path):
    command = [sys.executable, forking_program.__file__, explorer.url, str(tmp_path / "chats.jsonl")]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY / "agent_sdk")}
    done = subprocess.run(command, env=environ, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    child, parent = found["child"], found["parent"]
    assert (child["seen"], child["selected"], child["runs"] + child["dropped"], child["dropped"]) == (1, 1, 1, 0)
    assert (parent["seen"], parent["selected"], parent["runs"] + parent["dropped"], parent["dropped"]) == (2, 2, 2, 0)
    assert (child["rows"], parent["rows"]) == (1, 2), "each counts its own"
    assert (child["exported"], parent["exported"]) == (2, 3), "of one file, which has both"
    assert len({*child["msg_id"], *parent["msg_id"]}) == 2
    rewards = [row.reward for row in rows(explorer)]  # a collected chat has none
    assert (rewards.count(None), rewards.count(0.5), rewards.count(1.0)) == (3, 2, 3)
