"""The checks of this folder, in a run of their own: the worlds are not installed beside the product."""

from __future__ import annotations

import os

import pytest

from tests.examples.program import start
from tests.support.processes import REPOSITORY


@pytest.mark.timeout(1000)
def test_worlds_rewards_and_agents_under_their_own_python():
    start(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, f"--rootdir={REPOSITORY}"),
        *("-o", "python_files=check_*.py", str(REPOSITORY / "tests" / "examples")),
        limit_s=900,  # other tests' processes may leave it little of the processor
    )
