"""Advantages, against numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from shared.config import ReinforcePPConfig
from tests.support.batches import array, batch_of, precomputed, sequence
from trainer_service.algorithms.advantages import bound_outliers, gae, returns, running_moments, shaped_rewards, whiten
from trainer_service.algorithms.seam import Batch, one_each
from trainer_service.credit import Lineage
from trainer_service.trajectories import Trajectory


def test_gae_equals_numbers_computed_by_hand():
    # δ2 = 1 − 0.6 = 0.4; δ1 = 0.9·0.6 − 0.3 = 0.24; δ0 = 0.9·0.3 − 0.5 = −0.23; γλ = 0.45
    advantages, targets = gae(array(0, 0, 1), array(0.5, 0.3, 0.6), gamma=0.9, lam=0.5)
    np.testing.assert_allclose(advantages, [-0.23 + 0.45 * (0.24 + 0.45 * 0.4), 0.24 + 0.45 * 0.4, 0.4], rtol=1e-6)
    np.testing.assert_allclose(targets, advantages + array(0.5, 0.3, 0.6))


def test_gae_with_lambda_one_is_the_return_minus_the_value():
    rewards, values = array(0.2, -0.1, 1.0, 0.3), array(0.4, 0.1, -0.2, 0.9)
    advantages, _ = gae(rewards, values, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(advantages, np.cumsum(rewards[::-1])[::-1] - values, rtol=1e-6)


def test_returns_are_discounted_sums_of_later_rewards():
    np.testing.assert_allclose(returns(array(1, 0, 2), 0.5), [1 + 0.25 * 2, 0.5 * 2, 2])


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_all_tokens():
    flat = np.concatenate(whiten([array(1, 2, 3), array(10), array(-4, 0)]))
    assert flat.mean() == pytest.approx(0, abs=1e-6)
    assert flat.std() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("value", [0.7, -0.6, 0.1, 1e6, 0.0])
def test_advantages_that_are_all_equal_become_zero(value):
    """In float32 their mean is rounded, and dividing what is left by a tiny deviation gave ±0.9 a token."""
    assert not np.concatenate(whiten([np.full(count, value, np.float32) for count in (3, 100, 7)])).any()


def test_small_differences_are_whitened_like_large_ones():
    np.testing.assert_allclose(np.concatenate(whiten([array(1e-3, -1e-3)])), [1, -1], rtol=1e-6)


def test_running_moments_of_small_batches_are_those_of_all_of_them_together():
    draw, memory = np.random.default_rng(0), {}
    batches = [[draw.normal(3, 2, 4).astype(np.float32) for _ in range(5)] for _ in range(6)]
    for batch in batches:
        mean, std = running_moments(memory, batch, window=1000)
    everything = np.concatenate([array for batch in batches for array in batch], dtype=np.float64)
    assert (mean, std) == pytest.approx((everything.mean(), everything.std()))
    assert memory["sequences"] == 30


def test_running_moments_of_a_whole_batch_are_its_own():
    memory = {"sequences": 50, "mean": 9.0, "variance": 4.0}
    assert running_moments(memory, [array(1), array(3)], window=2) == pytest.approx((2, 1))


def test_running_moments_count_earlier_sequences_in_place_of_missing_ones():
    # three earlier ones of mean 9 and variance 4 beside one of 1: mean 7, variance ¾·4 + ¾·¼·64
    memory = {"sequences": 50, "mean": 9.0, "variance": 4.0}
    assert running_moments(memory, [array(1)], window=4) == pytest.approx((7, 15**0.5))
    assert memory == pytest.approx({"sequences": 4, "mean": 7, "variance": 15})


def test_one_huge_reward_is_brought_near_the_others_which_stay_as_they_are():
    rewards = [array(0, 1), array(0, -1), array(0, 2), array(0, 1e6), array(0, -2)]
    bounded = bound_outliers(rewards, [[1]] * 5, bound=10.0)
    # the median is 1; distances 2, 1, 3 and a million: their median is 2.5
    np.testing.assert_allclose(np.concatenate(bounded), [0, 1, 0, -1, 0, 2, 0, 1 + 25, 0, -2])
    assert rewards[3][1] == 1e6, "its argument is not changed"


def test_where_most_rewards_are_equal_the_few_others_are_no_outliers():
    rewards = [array(0)] * 60 + [array(1)] * 3 + [array(1e6)]
    bounded = np.concatenate(bound_outliers(rewards, [[0]] * 64, bound=10.0))
    assert bounded.max() == 10
    assert (bounded == 1).sum() == 3


def test_rewards_that_are_all_equal_are_left_alone():
    assert bound_outliers([array(5), array(5)], [[0], [0]], bound=10.0)[0].tolist() == [5]


@pytest.mark.parametrize("merges", [True, False])
def test_an_outcome_is_no_outlier_among_small_rewards_of_turns_whether_or_not_these_merged(merges):
    """Eight runs of six turns, each turn with a small reward; half of the runs also have an outcome of 1."""
    own = np.random.default_rng(0).uniform(0, 0.05, (8, 6))
    own[::2, -1] += 1
    earned = own[:, ::-1].cumsum(1)[:, ::-1]
    rewards = [array(*one) for one in (own if merges else earned.reshape(-1, 1))]
    bounded = bound_outliers(rewards, [list(range(len(one))) for one in rewards], bound=10.0)
    np.testing.assert_allclose(np.concatenate([returns(one, 1.0) for one in bounded]), earned.flatten(), rtol=1e-5)


def test_rewards_that_differ_by_rounding_alone_make_no_others_outliers():
    rewards = [array(1), array(1 + 1e-7), array(1 - 1e-7), array(1 + 2e-7), array(3)]
    assert np.concatenate(bound_outliers(rewards, [[0]] * 5, bound=10.0)).tolist() == np.concatenate(rewards).tolist()


def test_the_kl_penalty_lowers_the_reward_where_the_policy_left_the_reference():
    batch = batch_of(sequence([0, 1]))
    seen = precomputed(batch, proximal=[array(-1.0, -1.0)], reference=[array(-1.4, -1.0)])
    (rewards,) = shaped_rewards(batch, one_each([0]), seen, ReinforcePPConfig(kl_coef=0.5), {})
    np.testing.assert_allclose(rewards, [-0.5 * 0.4, 1.0], rtol=1e-6)


def test_normalized_rewards_have_a_running_deviation_of_one_and_keep_their_sign():
    config, memory = ReinforcePPConfig(kl_coef=0, outlier_bound=None, normalize_rewards=True), {}
    batch = batch_of(sequence([0, 300]), sequence([-100]))
    rewards = shaped_rewards(batch, one_each([0, 1]), precomputed(batch), config, memory)
    assert np.concatenate(rewards).tolist() == pytest.approx([0, 1.5, -0.5])
    batch = batch_of(sequence([100.0]))
    shaped_rewards(batch, one_each([0]), precomputed(batch), config, memory)
    assert memory["rewards"] == pytest.approx({"sequences": 3, "mean": 100, "variance": 80000 / 3})


@pytest.mark.parametrize("merges", [True, False])
def test_normalized_rewards_of_runs_do_not_depend_on_whether_their_turns_merged(merges):
    """Two runs of two turns with the outcomes 1 and 3: every turn has its run's outcome as its return."""
    config = ReinforcePPConfig(kl_coef=0, outlier_bound=None, normalize_rewards=True)
    given = [([0, 1], [0, 1]), ([0, 3], [0, 1])] if merges else [([r], [0]) for r in (1, 1, 3, 3)]
    runs = [sequence(rewards, ends=ends) for rewards, ends in given]
    batch = batch_of(*runs)
    rewards = shaped_rewards(batch, one_each(range(len(runs))), precomputed(batch), config, {})
    assert [float(one.sum()) for one in rewards] == ([1, 3] if merges else [1, 1, 3, 3])


def test_rewards_without_a_deviation_are_not_divided_by_it():
    config = ReinforcePPConfig(kl_coef=0, normalize_rewards=True)
    batch = batch_of(sequence([2.0]))
    assert shaped_rewards(batch, one_each([0]), precomputed(batch), config, {})[0].tolist() == [2]


@pytest.mark.parametrize(("estimator", "penalty"), [("k1", 0.4), ("k2", 0.08), ("k3", np.exp(-0.4) - 1 + 0.4)])
def test_each_estimator_of_the_kl_divergence_can_stand_in_the_reward(estimator, penalty):
    batch = batch_of(sequence([1]))
    seen = precomputed(batch, reference=[array(-1.4)])
    (rewards,) = shaped_rewards(batch, one_each([0]), seen, ReinforcePPConfig(kl_coef=0.5, kl=estimator), {})
    assert rewards.tolist() == pytest.approx([1 - 0.5 * penalty])


def test_a_penalty_in_the_loss_is_not_in_the_reward():
    batch = batch_of(sequence([1]))
    config = ReinforcePPConfig(kl_coef=0.5, kl="k3", kl_in="loss")
    assert shaped_rewards(batch, one_each([0]), precomputed(batch, reference=[array(-9)]), config, {})[0].tolist() == [
        1
    ]


@pytest.mark.parametrize("turns", [[0, 0, 0], [0, 1, 2], [0, 1, 0], [0, 1, 1], [0, 0, 1]], ids=str)
def test_a_turn_pays_for_later_turns_whether_or_not_they_merged(turns):
    """Turns of two actions, which cost 0.5 · (0.1, 0.2 and 0.3) and lead to an outcome of 1; turns: their sequences."""
    count = max(turns) + 1
    own = [[turn for turn, number in enumerate(turns) if number == one] for one in range(count)]
    made = [sequence([0.0] * (2 * len(some) - 1) + [1.0], ends=range(1, 2 * len(some), 2)) for some in own]
    run = Trajectory(None, made, turns, [None] * 3, 1.0, Lineage([None] * 3, [0, 1, 2], [True] * 3))
    batch = Batch.of([run])
    gaps = [[-0.1 * (turn + 1) * first - 1.0 for turn in some for first in (1, 0)] for some in own]
    seen = precomputed(batch, reference=[array(*gap) for gap in gaps])
    shaped = shaped_rewards(batch, one_each(range(count)), seen, ReinforcePPConfig(kl_coef=0.5), {})
    earned = [returns(rewards, 1.0) for rewards in shaped]
    found = [float(earned[number][begin]) for number, begin, _ in run.turn_spans()]
    np.testing.assert_allclose(found, [1 - 0.5 * 0.6, 1 - 0.5 * 0.5, 1 - 0.5 * 0.3], rtol=1e-6)
