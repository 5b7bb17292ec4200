"""kill -9 of explorers, engine and trainer while adapters are loaded and unloaded, with pins, restarts and deletions.

After each kill the engine must come to hold what the ledger asks for, and nothing else. Every answer is compared with
the version that it names: the scripted engine says in each token which version sampled it. No engine may ever hold an
adapter whose files are gone.

A short form runs in CI; FLYWHEEL_TORTURE=full kills 100 times.
"""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from sqlalchemy import select

from shared.experience import Tokens
from shared.ledger.queries import list_versions
from shared.ledger.tables import experiences, payloads
from shared.versions import verify_version, version_path
from tests.support.forms import FULL
from tests.support.processes import wait_for
from tests.torture.adapters import EXPLORERS, PARTS, Adapted, Customers, held, is_right

pytestmark = pytest.mark.torture
KILLS = 100 if FULL else 4


@pytest.mark.timeout(3600)
def test_whoever_dies_the_set_is_right_and_every_answer_is_its_version_s(tmp_path, model, lives):
    draw = random.Random(11)
    adapted = Adapted(tmp_path, model, lives, draw)
    customers = Customers(adapted.urls, 4)
    during: Counter[str] = Counter()
    try:
        for part in ("trainer", "engine", *EXPLORERS):
            adapted.begin(part)
        customers.come()
        wait_for(lambda: customers.answered["pin"] > 3 and held(adapted.config), "adapters in service", 240)
        for kill in range(KILLS):
            customers.come()
            victim = PARTS[kill % len(PARTS)]
            during[victim] += kill_in_a_load(adapted, victim, draw)
            time.sleep(draw.uniform(0, 0.5))  # a random while is what is wanted
            adapted.begin(victim)
            time.sleep(draw.uniform(0, 0.5))
            customers.pause()
            wait_for(lambda: is_right(adapted.config, adapted.ledger), f"the right set after {victim}'s death", 240)
            print(
                f"{kill + 1} kills: {victim}; {customers.answered.total()} answers, {len(customers.wrong)} wrong",
                flush=True,
            )
        customers.come()
        before = customers.answered.total()
        wait_for(lambda: customers.answered.total() > before + 20, "chats after the last kill", 240)
        customers.close()
        wait_for(lambda: is_right(adapted.config, adapted.ledger), "the right set in the end", 240)
        assert set(adapted.stop().values()) == {0}
        rows = count_rows(adapted)
    finally:
        customers.close()
        adapted.close()
    assert customers.wrong == []
    said = adapted.log("engine").read_text()
    assert "gone" not in said
    for part in ("engine", *EXPLORERS, "trainer"):
        assert "Traceback" not in adapted.log(part).read_text()
    loads, unloads = said.count("\nloaded"), said.count("\nunloaded")
    print(f"kills {dict(adapted.kills)}, {dict(during)} in a load or unload; {loads} loads, {unloads} unloads")
    print(f"{rows} rows; answered {dict(customers.answered)}; refused {dict(customers.refused)}")


def kill_in_a_load(adapted: Adapted, victim: str, draw: random.Random) -> bool:
    """Kill a part when the engine loads or unloads an adapter. Returns whether it still did so at that moment."""
    until = time.monotonic() + 5
    while not adapted.moving() and time.monotonic() < until:
        time.sleep(0.005)
    time.sleep(draw.uniform(0, 0.1))
    moving = adapted.moving()
    adapted.kill(victim)
    return moving


def count_rows(adapted: Adapted) -> int:
    """Each row names the version that sampled its tokens, and what is kept of versions verifies."""
    with adapted.ledger.read() as connection:
        rows = connection.execute(select(experiences, payloads.c.tokens).join(payloads)).all()
        versions = list_versions(connection)
    for row in rows:
        assert row.version == row.version_end
        assert set(Tokens.decode(row.tokens).logprobs.tolist()) == {-float(row.version)}
    for version in versions:
        if version.has_files:
            verify_version(adapted.config.root / version_path(version.version), version.manifest_sha256)
    return len(rows)
