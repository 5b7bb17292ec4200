"""The breaker's bounds, by algorithm: at 100 times its rate none publishes a version worse than its parent by 0.1, and
at its rate each publishes them all.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.config import ALGORITHMS, TrainerConfig
from shared.stop_request import StopRequest
from tests.integration.test_update import build
from tests.support.batches import rows_batch
from tests.support.even_odd import expected_reward, make_taught_model, sampled, with_feedback
from tests.support.forms import FULL
from trainer_service.breaker import Breaker, Trip
from trainer_service.patience import PatientLedger
from trainer_service.watch.record import Record

ROWS, UPDATES, RATE = 16, 3, 1e-4
DRAWS = 8 if FULL else 1
SETTINGS: dict[str, dict[str, Any]] = {
    "hint": {"neutral_reward": None, "least_effect": 0.0},
    "distill": {"url": "http://127.0.0.1:9"},  # what it would answer stands in the rows
}


@pytest.fixture(scope="module")
def taught(tmp_path_factory) -> Path:
    return make_taught_model(tmp_path_factory.mktemp("taught") / "base")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """More cost more than they gain in a model of this size."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(root: Path, base: Path, algorithm: str, rate: float, seed: int) -> tuple[list[float], Trip | None]:
    """The reward of each version that is published, the base first, and what tripped the breaker."""
    section = {algorithm: SETTINGS[algorithm]} if algorithm in SETTINGS else {}
    update, policy = build(root, base, algorithm=algorithm, learning_rate=rate, batch_size=ROWS, **section)
    stop = StopRequest()
    breaker = Breaker(TrainerConfig(), None, PatientLedger(None, stop, 0.1), stop, lambda tripped: None)
    rewards, trip = [expected_reward(policy)], None
    for step in range(UPDATES):
        draw = np.random.default_rng([seed, step])
        rows = sampled(policy.eval(), draw, ROWS, pairs=algorithm == "dpo")
        batch = rows_batch(with_feedback(row, algorithm, draw) for row in rows)
        stats = update.update(batch, step=step, version=step)
        if (trip := breaker.check(Record(step + 1, step, 0.0, dict(stats)))) is not None:
            break
        rewards.append(expected_reward(policy))
    update.close()
    return rewards, trip


@pytest.mark.parametrize("seed", range(DRAWS))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_hundred_times_the_rate_publishes_nothing_worse_and_the_rate_itself_everything(
    algorithm, seed, tmp_path, taught
):
    spoiled, trip = run(tmp_path / "spoiled", taught, algorithm, 100 * RATE, seed)
    assert all(after > before - 0.1 for before, after in pairwise(spoiled)), spoiled
    assert trip is not None, "it moved as far in several updates"
    healthy, trip = run(tmp_path / "healthy", taught, algorithm, RATE, seed)
    assert trip is None and len(healthy) == UPDATES + 1
    assert min(healthy) > healthy[0] - 0.1
