"""An operator promotes a version while agents chat and the trainer goes on: later ones wait until they are wanted."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Live
from tests.e2e.test_5_rollback import greedy
from tests.support.processes import wait_for

pytestmark = pytest.mark.engine


def test_a_promoted_version_answers_while_later_ones_are_trained_and_wait(live):
    good = live.learn(8)
    before = greedy(live, good)
    live.http.post(f"/versions/{good}/promote").raise_for_status()
    for number in range(8):
        live.rate(live.chat()["id"], float(number % 2))
    live.http.post("/commit").raise_for_status()
    wait_for(lambda: newest(live) > good and not untrained(live), "a later version", 240)
    later = newest(live)
    assert {live.chat()["version"] for _ in range(10)} == {good}
    assert greedy(live, good) == pytest.approx(before, abs=1e-4)

    live.http.post(f"/versions/{later}/promote").raise_for_status()
    wait_for(lambda: live.status()["versions"]["serving"] == later, "the later version in service", 120)
    assert live.chat()["version"] == later
    live.http.post(f"/versions/{good}/promote").raise_for_status()
    wait_for(lambda: live.status()["versions"]["serving"] == good, "the earlier version in service", 120)
    assert greedy(live, good) == pytest.approx(before, abs=1e-4)

    live.http.put("/traffic", json={"weights": None}).raise_for_status()
    wait_for(lambda: live.status()["lag_versions"] == 0, "the newest version in service", 120)
    assert live.learn(8) > later


def newest(live: Live) -> int:
    version: int = live.status()["versions"]["newest"]
    return version


def untrained(live: Live) -> int:
    rows = live.status()["rows"]
    return int(rows["READY"] + rows["LEASED"])
