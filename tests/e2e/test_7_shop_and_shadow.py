"""The shop and the shadow as a person runs them, on the real engine; what they must reach, in the long run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Live
from tests.e2e.test_7_examples import play
from tests.examples.program import start
from tests.support.forms import FULL

AIMS = {"webshop": ("reward", 0.30, ("--loop",)), "email_search": ("right", 0.30, ())}


def shadow(root: Path, *options: str, limit_s: float) -> dict[str, Any]:
    """The shadow's figures: what holds in any run is checked."""
    printed = start("-m", "examples.shadow", "--root", str(root), *options, limit_s=limit_s)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    assert found["production_failures"] == found["refunds_by_shadow"] == 0
    assert found["production_reward"] == 1.0
    assert found["refunds_paid"] == found["refunds_by_production"] > 0
    assert (root / "report.html").read_text().count("<polyline") == 2
    return found


@pytest.mark.engine
def test_production_is_untouched_by_a_shadow_that_can_do_nothing(tools_live: Live, tmp_path):
    options = ("--url", str(tools_live.http.base_url), "--minutes", "0.2", "--held-out", "4")
    found = shadow(tmp_path / "run", *options, limit_s=500)
    assert found["production_calls"] > 10


@pytest.mark.engine
@pytest.mark.torture
@pytest.mark.skipif(not FULL, reason="minutes of learning: FLYWHEEL_TORTURE=full")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", AIMS)
def test_shoppers_and_clerks_learn(name, seed, tmp_path):
    metric, aim, options = AIMS[name]
    found = play(name, tmp_path / "run", "--seed", str(seed), *options, limit_s=1100)
    assert found["after"][metric] - found["before"][metric] >= aim


@pytest.mark.engine
@pytest.mark.torture
@pytest.mark.skipif(not FULL, reason="minutes of learning: FLYWHEEL_TORTURE=full")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
def test_the_shadow_learns(seed, tmp_path):
    found = shadow(tmp_path / "run", "--seed", str(seed), limit_s=1100)
    assert found["after"]["reward"] - found["before"]["reward"] >= 0.30
    assert found["failures"] == {}


@pytest.mark.engine
@pytest.mark.torture
@pytest.mark.skipif(not FULL, reason="minutes of learning: FLYWHEEL_TORTURE=full")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [*AIMS, "shadow"])
def test_nothing_is_learned_from_the_rewards_of_others(name, tmp_path):
    if name == "shadow":
        found = shadow(tmp_path / "run", "--shuffled", limit_s=1100)
    else:
        found = play(name, tmp_path / "run", "--shuffled", *AIMS[name][2], limit_s=1100)
    errors = sum(found[when]["standard_error"] for when in ("before", "after"))
    assert found["after"]["reward"] - found["before"]["reward"] <= 2 * errors
