"""Figures of a batch: what was not measured is absent, and a row is of use by what was said of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.batches import rows_batch
from tests.support.experiences import make_experiences
from tests.support.models import make_tiny_model
from trainer_service.update import _stats


@pytest.fixture
def rows(tmp_path):
    return make_experiences(make_tiny_model(tmp_path / "base"), 8)


def test_a_row_whose_correction_is_learned_is_of_use(rows):
    written = np.array([5, 6, 2], np.int32)
    batch = rows_batch([replace(row, correction=written) if row.id % 4 == 0 else row for row in rows])
    nothing = [np.zeros(0, np.float32)] * len(batch.sequences)
    stats = _stats(batch, nothing, set(batch.written), version=0, ahead=0)
    assert (stats["rows"], stats["rows_unused"]) == (8, 6)


def test_without_rewards_there_is_no_mean_of_them(rows):
    for given, is_there in ((rows, True), ([replace(r, reward=None, turn_reward=None) for r in rows], False)):
        batch = rows_batch(given)
        nothing = [np.zeros(0, np.float32)] * len(batch.sequences)
        assert ("reward_mean" in _stats(batch, nothing, set(), version=0, ahead=0)) is is_there
