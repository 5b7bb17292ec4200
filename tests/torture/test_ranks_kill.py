"""Rank 0 or 1 is killed at random moments: in a look, a step, a save, while publishing and between.

What comes out are the bits of two ranks that nobody disturbed, and every row is trained on once. CI runs a short form;
FLYWHEEL_TORTURE=full kills 200 times, 50 under each ZeRO stage.
"""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from shared.ports import free_port
from tests.integration.test_trainer import check_same_line
from tests.support.experiences import make_experiences
from tests.support.lives import Life, Lives
from tests.support.processes import wait_for
from tests.support.trained_roots import LAST, ROWS, begin, newest, prepare

pytestmark = pytest.mark.torture
FULL = os.environ.get("FLYWHEEL_TORTURE") == "full"
ROUNDS = 10 if FULL else 1  # under each stage; each goes from no version to the last
KILLS = 5 if FULL else 2  # in a round
LONGEST_S = 0.5  # from a version to a kill: longer than an update takes


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", [0, 1, 2, 3] if FULL else [3])
def test_ranks_that_are_killed_go_on_to_the_bits_of_ranks_that_nobody_disturbed(stage, tmp_path, lives, model):
    rows = make_experiences(model, ROWS)
    settings = {"ranks": 2, "deepspeed": {"zero_optimization": {"stage": stage}}}
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    prepare(undisturbed, model, rows, **settings)
    finish(lives, undisturbed)
    draw = random.Random(5 + stage)
    for number in range(ROUNDS):
        root = tmp_path / f"killed-{number}"
        root.mkdir()
        prepare(root, model, rows, **settings)
        for _ in range(KILLS):
            kill_a_rank(lives, root, draw)
        finish(lives, root)
        check_same_line(root, undisturbed)


def ranks(lives: Lives, root: Path) -> list[Life]:
    """Two ranks, as `flywheel trainer` starts them."""
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    return [begin(lives, root, **job, RANK=f"{rank}", LOCAL_RANK=f"{rank}") for rank in range(2)]


def kill_a_rank(lives: Lives, root: Path, draw: random.Random) -> None:
    """In the middle of whatever it does after the next version; the other one then ends by itself.

    Ranks that have not met yet wait longer for one another, and are not killed here.
    """
    seen, log = newest(root), root / "trainer.log"
    before = log.stat().st_size if log.exists() else 0
    both = ranks(lives, root)
    try:
        wait_for(lambda: b"loading" in log.read_bytes()[before:], "ranks that have met", 60, 0.005)
        if draw.random() < 0.8 and seen < LAST:
            wait_for(lambda: newest(root) > seen or not all(one.alive for one in both), "progress", 60, 0.005)
        threading.Event().wait(draw.random() * LONGEST_S)  # a random moment is what is wanted
        victim = draw.randrange(2)
        both[victim].kill()
        assert both[1 - victim].wait(30) == 1
    finally:
        for one in both:
            one.kill()


def finish(lives: Lives, root: Path) -> None:
    both = ranks(lives, root)
    try:
        wait_for(lambda: newest(root) == LAST or not both[0].alive, "the last version", 60)
        assert [both[0].stop(), both[1].wait(30)] == [0, 0]
    finally:
        for one in both:
            one.kill()
