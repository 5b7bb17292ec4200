"""What was said late acts once, whatever kills the trainer meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
from sqlalchemy import select

from shared.experience import Experience
from shared.ledger.tables import batches
from shared.reward import Lesson, Signal, lessons_of
from tests.support.experiences import make_experiences
from tests.support.forms import FULL
from tests.support.lessons import commit, record, say, stands
from tests.support.lives import Lives
from tests.support.processes import wait_for
from tests.support.trained_roots import begin, newest, open_ledger, prepare, weights


@dataclass(frozen=True)
class Story:
    """What is said of each row, and what is said once it was trained on."""

    algorithms: dict[str, float]
    first: Callable[[Experience], Signal]
    late: Callable[[Experience], Signal]

    def taught(self, row: Experience) -> Lesson:
        return lessons_of([self.first(row).kind, self.late(row).kind])


def reward(row: Experience) -> Signal:
    return Signal("reward", value=row.reward)


def rating(row: Experience) -> Signal:
    return Signal("rating", text="up" if row.id % 2 else "down")


STORIES = {
    "a reward after a correction": Story(
        {"reinforce_pp": 1.0, "sft": 0.2}, lambda _: Signal("correction", text="w3 w4"), reward
    ),
    "a comment after a rating": Story(
        {"reinforce_pp": 1.0, "hint": 0.5}, rating, lambda _: Signal("comment", text="w3 w4")
    ),
}


FAULTS = ["before transitions.publish", "after transitions.publish"]


@pytest.fixture(scope="module")
def story(request) -> Story:
    return STORIES[request.param]


@pytest.fixture(scope="module")
def undisturbed(story, tmp_path_factory, model, lives) -> Path:
    """The root of a trainer that nobody killed."""
    root = tmp_path_factory.mktemp("undisturbed")
    run(story, root, model, lives)
    return root


def run(story: Story, root: Path, model: Path, lives: Lives, fault: str | None = None) -> list[Experience]:
    """Two versions of the same rows. fault: kills the trainer at the second version, before it is started again."""
    prepare(root, model, algorithms=story.algorithms)
    sampled = make_experiences(model, 8)
    ledger = open_ledger(root)
    for row in sampled:
        record(ledger, row.msg_id, tokens=row.tokens)
    for version, said in enumerate((story.first, story.late), start=1):
        for row in sampled:
            say(ledger, row.msg_id, said(row))
        assert commit(ledger) == len(sampled)
        if version == 2 and fault:
            with begin(lives, root, FAULT=fault) as trainer:
                assert trainer.wait(240) == -9
        with begin(lives, root) as trainer:
            wait_for(lambda version=version: newest(root) == version or not trainer.alive, "the next version", 240)
            assert trainer.stop() == 0
    ledger.close()
    return sampled


@pytest.mark.parametrize(
    ("story", "fault"),
    list(product(STORIES, FAULTS) if FULL else zip(STORIES, FAULTS, strict=True)),
    indirect=["story"],
    scope="module",
)
def test_killed_while_it_publishes_what_was_said_late_acts_once(fault, story, tmp_path, model, lives, undisturbed):
    (taught,) = {story.taught(row) for row in run(story, tmp_path, model, lives, fault)}
    ledger = open_ledger(tmp_path)
    assert set(stands(ledger, "state", "consumed_version", "teaches", "taught")) == {("CONSUMED", 1, 0, taught)}
    with ledger.read() as connection:
        assert connection.execute(select(batches.c.consumed_version).order_by(batches.c.id)).scalars().all()[-1] == 2
    assert commit(ledger) == 0
    ledger.close()
    assert weights(tmp_path, 2) == weights(undisturbed, 2) != weights(undisturbed, 1) != weights(undisturbed, 0)
