"""The short form of benchmarks/reload: what must hold at any speed of the machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.forms import FULL
from tests.support.processes import REPOSITORY

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not FULL, reason="minutes of two engines"),
]


def test_a_reload_under_streams_breaks_no_reply_and_leaves_the_weights_of_the_version():
    options = ["--reloads", "2", "--streams", "4", "--delta-steps", "6", "--adapters", "0"]
    command = [sys.executable, "-m", "benchmarks.reload", *options]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=580, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    report = json.loads(run.stdout)
    assert report["fresh_engine_equal"]
    for what in ("none", "reload", "drain"):
        figures = report["4 streams"][what]
        assert figures["replies"] == 8
        assert (figures["failed"], figures["truncated"], figures["reordered"]) == (0, 0, 0), what
        assert figures["late_failed"] == 0 < figures["late_chats"]
    assert report["4 streams"]["none"]["late_chats"] == report["4 streams"]["reload"]["late_chats"]
    assert report["deltas"]["1e-06"]["share_of_bytes"] <= 0.015
    assert report["deltas"]["1e-05"]["share_of_bytes"] <= 0.075  # of the first six steps, the largest ones
