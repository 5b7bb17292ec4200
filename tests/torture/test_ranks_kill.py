"""Rank 0 or 1 is killed at random moments: in a look, a step, a save, while publishing and between.

What comes out are the bits of two ranks that nobody disturbed, and every row is trained on once. CI runs a short form;
FLYWHEEL_TORTURE=full kills 200 times, under each ZeRO stage.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest

from tests.integration.test_ranks import ranks_of
from tests.integration.test_trainer import check_same_line
from tests.support.experiences import make_experiences
from tests.support.lives import Lives
from tests.support.processes import wait_for
from tests.support.trained_roots import LAST, ROWS, begin, newest, prepare

pytestmark = pytest.mark.torture
FULL = os.environ.get("FLYWHEEL_TORTURE") == "full"
KILLS = 50 if FULL else 1


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("stage", [0, 1, 2, 3] if FULL else [3])
def test_ranks_that_are_killed_go_on_to_the_bits_of_ranks_that_nobody_disturbed(stage, tmp_path, lives, model):
    rows = make_experiences(model, ROWS)
    settings = {"ranks": 2, "deepspeed": {"zero_optimization": {"stage": stage}}}
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    prepare(undisturbed, model, rows, **settings)
    finish(lives, undisturbed)
    draw = random.Random(5)
    for number in range(KILLS):
        root = tmp_path / f"killed-{number}"
        root.mkdir()
        prepare(root, model, rows, **settings)
        kill_a_rank(lives, root, draw)
        finish(lives, root)
        check_same_line(root, undisturbed)


def kill_a_rank(lives: Lives, root: Path, draw: random.Random) -> None:
    version = draw.randrange(LAST)
    with begin(lives, root) as process:
        wait_for(lambda: newest(root) >= version, "progress", 60, 0.005)
        threading.Event().wait(draw.random() * 0.3)  # a random moment is what is wanted
        os.kill(draw.choice(ranks_of(process)).pid, signal.SIGKILL)
        assert process.wait(60) == 1


def finish(lives: Lives, root: Path) -> None:
    with begin(lives, root) as process:
        wait_for(lambda: newest(root) == LAST or not process.alive, "the last version", 60)
        assert process.stop() == 0
