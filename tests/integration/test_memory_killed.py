"""What a trainer remembers is bit-equal after kill -9: a tracker, an average of weights, rewards seen, rehearsal."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import select

from shared.ledger.queries import find_trainer
from shared.ledger.tables import experiences
from shared.reward import Signal
from tests.support.experiences import make_experiences
from tests.support.lessons import commit, record, say
from tests.support.lives import Lives
from tests.support.processes import wait_for
from tests.support.trained_roots import BATCH, begin, newest, open_ledger, prepare, weights

VERSIONS = 4
MIX = {"algorithms": {"spo": 1.0, "hint": 1.0, "sft": 0.2}, "rehearse": 1.0, "center_keys": True}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, model, lives) -> Path:
    """The root of a trainer that nobody killed."""
    root = tmp_path_factory.mktemp("undisturbed")
    run(root, model, lives)
    return root


def run(root: Path, model: Path, lives: Lives, fault: str | None = None) -> None:
    """Versions of rows that were rewarded, commented on and corrected. fault: kills each life at its second version."""
    prepare(root, model, **MIX)
    ledger = open_ledger(root)
    for number, row in enumerate(make_experiences(model, VERSIONS * BATCH)):
        record(ledger, row.msg_id, tokens=row.tokens)
        said = [Signal("reward", value=row.reward), Signal("comment", text=f"w{number % 5} w3")]
        say(ledger, row.msg_id, *said, *([Signal("correction", text="w3 w4")] if number % 4 == 0 else []))
    commit(ledger)
    if fault is not None:
        for _ in range(2):
            with begin(lives, root, FAULT=fault, FAULT_CALL="2") as trainer:
                assert trainer.wait(90) == -9
    with begin(lives, root) as trainer:
        wait_for(lambda: newest(root) == VERSIONS or not trainer.alive, "the last version", 90)
        assert trainer.stop() == 0
    with ledger.read() as connection:
        found = find_trainer(connection, "trainer")
        assert found is not None and {"rehearsed", "spo/tracked_keys", "hint/hints"} <= found.stats.keys(), found.stats
        assert set(connection.execute(select(experiences.c.state)).scalars()) == {"CONSUMED"}
    ledger.close()


@pytest.mark.parametrize("fault", ["after StateStore.save", "after transitions.publish"])
def test_killed_twice_it_goes_on_to_the_same_bits(fault, tmp_path, model, lives, undisturbed):
    run(tmp_path, model, lives, fault)
    for version in range(VERSIONS + 1):
        assert weights(tmp_path, version) == weights(undisturbed, version), f"version {version} differs"
    assert len({weights(tmp_path, version) for version in range(VERSIONS + 1)}) == VERSIONS + 1
