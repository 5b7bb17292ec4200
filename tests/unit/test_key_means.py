"""Rewards that are compared with what their key gives: by hand, over batches, and in an update's memory."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from shared.config import TrainerConfig
from tests.support.batches import rewarded_batch
from trainer_service.key_means import MOST_KEYS, SHRINKAGE, center_keys


def test_a_key_is_compared_with_itself_and_a_new_one_mostly_with_all():
    batch, memory = rewarded_batch([("strict", 0.0)] * 4 + [("mild", r) for r in (0.0, 1.0, 1.0, 0.0)]), {}
    before = [sequence.rewards.copy() for sequence in batch.sequences]
    centred = [float(s.rewards.sum()) for s in center_keys(batch, memory).sequences]
    mean = 2 / 8
    strict, mild = mean - SHRINKAGE * mean / (4 + SHRINKAGE), mean - (4 * 0.5 + SHRINKAGE * mean) / (4 + SHRINKAGE)
    assert centred == pytest.approx([strict] * 4 + [mild, 1 + mild, 1 + mild, mild])
    assert all(np.array_equal(s.rewards, own) for s, own in zip(batch.sequences, before, strict=True))


def test_a_key_that_hates_everything_ends_at_the_mean_of_all():
    memory = {}
    for _ in range(40):
        batch = rewarded_batch([("grump", 0.0)] * 8 + [(f"k{n % 4}", float(n % 2)) for n in range(8)])
        centred = center_keys(batch, memory)
    grumps = [float(s.rewards.sum()) for s in centred.sequences[:8]]
    assert memory["all"]["mean"] == pytest.approx(0.25) and grumps == pytest.approx([0.25] * 8, abs=0.01)


def test_a_constant_difference_between_keys_disappears():
    memory = {}
    for _ in range(40):
        batch = rewarded_batch([("mild", 0.5 + r) for r in (0.0, 0.5)] * 4 + [("strict", r) for r in (0.0, 0.5)] * 4)
        found = [float(s.rewards.sum()) for s in center_keys(batch, memory).sequences]
    assert found[0] == pytest.approx(found[8], abs=0.02) and found[1] - found[0] == pytest.approx(0.5)


def test_a_rare_key_is_worth_as_much_as_a_frequent_one_while_rewards_rise():
    memory = {}
    for step in range(20):
        reward = 0.1 + 0.04 * step
        batch = rewarded_batch([("often", reward)] * 60 + [("rare", reward)] * 4)
        found = [float(s.rewards.sum()) for s in center_keys(batch, memory).sequences]
    assert found[0] == pytest.approx(found[-1], abs=0.05)


def test_what_nobody_rewarded_is_left_alone_and_counts_nowhere():
    batch, memory = rewarded_batch([("a", None), ("a", None)]), {}
    assert center_keys(batch, memory) is batch and memory == {}


def test_keys_that_were_not_seen_for_long_are_forgotten():
    memory = {}
    center_keys(rewarded_batch([("first", 1.0), ("second", 0.0)]), memory)
    for start in range(0, MOST_KEYS, 100):
        center_keys(rewarded_batch([("second", 0.0), *((f"k{start + n}", 0.5) for n in range(100))]), memory)
    assert len(memory["above"]) == MOST_KEYS and "first" not in memory["above"] and "second" in memory["above"]


def test_the_same_batch_after_the_same_memory_gives_the_same_numbers():
    batch, memory = rewarded_batch([("a", 0.3), (None, 0.9), ("b", 0.1)]), {}
    center_keys(batch, memory)
    again = copy.deepcopy(memory)
    one, other = center_keys(batch, memory), center_keys(batch, again)
    pairs = zip(one.sequences, other.sequences, strict=True)
    assert memory == again and all(np.array_equal(a.rewards, b.rewards) for a, b in pairs)


def test_bounds_of_a_tracker_are_refused_with_center_keys():
    with pytest.raises(ValueError, match="center_keys moves rewards out of"):
        TrainerConfig.model_validate({"algorithm": "spo", "spo": {"bounds": [0, 1]}, "center_keys": True})
