"""Rank 0 or 1 is killed at random moments: in a look, a step, a save, while publishing and between.

What comes out are the bits of two ranks that nobody disturbed, and every row is trained on once. CI runs a short form;
FLYWHEEL_TORTURE=full kills 200 times, 50 under each ZeRO stage.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from shared.ledger.queries import list_versions
from tests.integration.test_ranks import ranks_of
from tests.support.experiences import make_experiences
from tests.support.forms import FULL
from tests.support.lives import Lives
from tests.support.processes import wait_for
from tests.support.trained_roots import BATCH, LAST, begin, check_same_line, finish, newest, open_ledger, prepare

pytestmark = pytest.mark.torture
ROUNDS = 10 if FULL else 1  # under each stage; each goes from no version to the last
KILLS = 5 if FULL else 1  # in a round
END = LAST if FULL else 3  # the last version


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", [0, 1, 2, 3] if FULL else [3])
def test_ranks_that_are_killed_go_on_to_the_bits_of_ranks_that_nobody_disturbed(stage, tmp_path, lives, model):
    rows = make_experiences(model, END * BATCH)
    settings = {"ranks": 2, "deepspeed": {"zero_optimization": {"stage": stage}}}
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    prepare(undisturbed, model, rows, **settings)
    finish(lives, undisturbed, END)
    draw, longest_s = random.Random(5 + stage), seconds_of_an_update(undisturbed)
    for number in range(ROUNDS):
        root = tmp_path / f"killed-{number}"
        root.mkdir()
        prepare(root, model, rows, **settings)
        for _ in range(KILLS):
            kill_a_rank(lives, root, draw, longest_s)
        finish(lives, root, END)
        check_same_line(root, undisturbed, END)


def kill_a_rank(lives: Lives, root: Path, draw: random.Random, longest_s: float) -> None:
    """In the middle of whatever it does after the next version; the whole job then ends by itself."""
    seen = newest(root)
    with begin(lives, root) as job:
        both = wait_for(lambda: found if len(found := ranks_of(job)) == 2 else None, "two ranks", 240, 0.005)
        if draw.random() < 0.8 and seen < END:
            wait_for(lambda: newest(root) > seen or not job.alive, "progress", 240, 0.005)
        threading.Event().wait(draw.random() * longest_s)  # a random moment is what is wanted
        both[draw.randrange(2)].kill()
        assert job.wait(240) == 1
        assert not any(one.is_running() for one in both)


def seconds_of_an_update(root: Path) -> float:
    """With its save and its version, on average of an undisturbed run."""
    ledger = open_ledger(root)
    with ledger.read() as connection:
        times = [row.created_at for row in list_versions(connection) if row.version]
    ledger.close()
    return (max(times) - min(times)) / (len(times) - 1)
