"""kill -9 of whoever stages for an engine, at each operation on a file: the next one stages every version whole.

CI dies at a few of the operations; FLYWHEEL_TORTURE=full at each of them.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.engine.stage import Stage
from tests.support.deltas import Weights, contents
from tests.support.forms import FULL
from tests.support.processes import REPOSITORY, environment

pytestmark = pytest.mark.torture
VERSIONS = range(8)  # 0, 3 and 6 are whole, the others deltas of the one before
STAGE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from services.engine.stage import Stage

root, folder, left = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

def count(event, arguments):
    global left
    if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(folder) in str(arguments[0]):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

stage = Stage(root, folder, keep=2)
sys.addaudithook(count)
for version in map(int, sys.argv[4:]):
    stage.stage(version)
"""


def died(root: Path, folder: Path, operation: int) -> bool:
    """Whether it came so far as to die at that operation."""
    program = [sys.executable, "-c", STAGE_AND_DIE, root, folder, str(operation), *map(str, VERSIONS)]
    status = subprocess.run(program, cwd=REPOSITORY, env=environment(), check=False).returncode
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.timeout(600)
def test_whoever_dies_at_any_operation_the_next_one_stages_every_version_whole(tmp_path):
    weights = Weights(tmp_path / "root", anchor_every=3)
    for version in VERSIONS:
        weights.publish(version)
    published = {version: contents(weights.folder(version)) for version in VERSIONS}
    whole = {version: contents(Stage(weights.root, tmp_path / "whole", keep=1).stage(version)) for version in VERSIONS}
    folder, operation, deaths = tmp_path / "staged", 1, 0
    while died(weights.root, folder, operation):
        deaths += 1
        stage = Stage(weights.root, folder, keep=2)
        assert list(folder.iterdir()) == [], "what a dead process staged counts for nothing"
        assert {version: contents(stage.stage(version)) for version in VERSIONS} == whole
        operation += 1 if FULL else 20
    assert deaths >= (80 if FULL else 3)
    assert {version: contents(weights.folder(version)) for version in VERSIONS} == published
    print(f"{deaths} deaths")
