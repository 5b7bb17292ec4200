"""What a trainer remembers is bit-equal after kill -9: trackers, averages, running means and counts, rehearsal."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from shared.ledger.queries import find_trainer
from shared.ledger.tables import experiences
from shared.reward import Signal
from tests.support.experiences import make_experiences
from tests.support.forms import FULL
from tests.support.lessons import commit, record, say
from tests.support.lives import Lives
from tests.support.processes import wait_for
from tests.support.trained_roots import BATCH, begin, newest, open_ledger, prepare, weights

VERSIONS = 4
MIXES: dict[str, dict[str, Any]] = {
    "words": {"algorithms": {"spo": 1.0, "hint": 1.0, "sft": 0.2}, "rehearse": 1.0, "center_keys": True},
    "scores": {"algorithms": {"ppo": 1.0, "grpo": 1.0, "kto": 1.0}},
}
FIGURES = {
    "words": {"rehearsed", "spo/tracked_keys", "hint/hints"},
    "scores": {"ppo/explained_variance", "grpo/groups_of_one", "kto/rated"},
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, model, lives) -> Callable[[str], Path]:
    """The root of a trainer that nobody killed, of each mix."""

    @cache
    def root_of(mix: str) -> Path:
        root: Path = tmp_path_factory.mktemp(mix)
        run(mix, root, model, lives)
        return root

    return root_of


def run(mix: str, root: Path, model: Path, lives: Lives, fault: str | None = None) -> None:
    """Versions of rows of which much was said. fault: kills each life at its second version."""
    prepare(root, model, **MIXES[mix])
    ledger = open_ledger(root)
    for number, row in enumerate(make_experiences(model, VERSIONS * BATCH)):
        record(ledger, row.msg_id, tokens=row.tokens)
        said = [Signal("reward", value=row.reward), Signal("comment", text=f"w{number % 5} w3")]
        said.append(Signal("rating", text="up" if number % 3 else "down"))
        say(ledger, row.msg_id, *said, *([Signal("correction", text="w3 w4")] if number % 4 == 0 else []))
    commit(ledger)
    if fault is not None:
        for _ in range(2):
            with begin(lives, root, FAULT=fault, FAULT_CALL="2") as trainer:
                assert trainer.wait(240) == -9
    with begin(lives, root) as trainer:
        wait_for(lambda: newest(root) == VERSIONS or not trainer.alive, "the last version", 240)
        assert trainer.stop() == 0
    with ledger.read() as connection:
        found = find_trainer(connection, "trainer")
        assert found is not None and FIGURES[mix] <= found.stats.keys(), found.stats
        assert set(connection.execute(select(experiences.c.state)).scalars()) == {"CONSUMED"}
    ledger.close()


DEATHS = [("words", "after StateStore.save"), ("scores", "after StateStore.save")]


@pytest.mark.parametrize(("mix", "fault"), DEATHS + FULL * [("words", "after transitions.publish")])
def test_killed_twice_it_goes_on_to_the_same_bits(mix, fault, tmp_path, model, lives, undisturbed):
    run(mix, tmp_path, model, lives, fault)
    for version in range(VERSIONS + 1):
        assert weights(tmp_path, version) == weights(undisturbed(mix), version), f"version {version} differs"
    assert len({weights(tmp_path, version) for version in range(VERSIONS + 1)}) == VERSIONS + 1
