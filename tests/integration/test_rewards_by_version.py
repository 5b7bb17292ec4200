"""The mean rewards of versions, which the breaker compares."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.config import BreakerConfig
from shared.ledger.queries import rewards_by_version
from tests.support.experiences import record_ready, rows
from trainer_service.breaker import reward_drop


def test_a_reward_whose_square_is_no_number_above_0_counts_with_a_square_of_0(ledger):
    tiny = [replace(row, reward=reward) for row, reward in zip(rows(2), (1e-200, -5e-324), strict=True)]
    record_ready(ledger, tiny)
    (found,) = ledger.fetch(rewards_by_version)
    assert (found.count, found.mean, found.mean_square) == (2, pytest.approx(0.0), 0.0)


def test_a_reward_that_no_row_is_trained_on_with_is_in_no_mean(ledger):
    """`reward.accept: null` accepts rewards whose squares no database can add."""
    ordinary = [replace(row, reward=0.5) for version in range(4) for row in rows(2, version, name=f"v{version}-")]
    huge = [replace(row, reward=reward) for row, reward in zip(rows(2, 3, name="huge-"), (1e200, -1e300), strict=True)]
    record_ready(ledger, [*ordinary, *huge])
    found = ledger.fetch(rewards_by_version)
    assert [(one.version, one.count, one.mean, one.mean_square) for one in found] == [
        (version, 2, pytest.approx(0.5), pytest.approx(0.25)) for version in range(4)
    ]
    assert reward_drop(found, BreakerConfig(reward_versions=2, reward_rows=1)) == 0.0
