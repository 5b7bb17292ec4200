"""Runs an agent of a framework in the clients' environment."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from tests.support.processes import REPOSITORY

CLIENTS = REPOSITORY / ".venv-clients"
FRAMEWORKS = [
    "agentscope_1",
    "agentscope_2",
    "langchain",
    "langgraph",
    "openai_agents",
    "pydantic_ai",
    "litellm",
    "smolagents",
]


def run_program(name: str, *arguments: str) -> Any:
    """What a program of this folder says in its last line, in JSON, under the clients' Python."""
    ended = subprocess.run(
        [CLIENTS / "bin/python", REPOSITORY / "tests/sdk" / name, *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "agent_sdk")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def run_framework(framework: str, url: str, runs: int) -> dict[str, list[str]]:
    """The message ids of each run, by its task id."""
    path = [str(REPOSITORY / "agent_sdk"), *([str(CLIENTS / "agentscope-1")] if framework == "agentscope_1" else [])]
    assert (CLIENTS / "bin/python").exists(), "the clients are not installed: run `make clients`"
    ended = subprocess.run(
        [CLIENTS / "bin/python", REPOSITORY / "tests/sdk/frameworks_program.py", framework, url, str(runs)],
        env={**os.environ, "PYTHONPATH": ":".join(path)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found
