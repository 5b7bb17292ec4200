"""PPO's mathematics, against numbers computed by hand and against an oracle written another way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shared.config import PPOConfig
from trainer_service.algorithms import ppo
from trainer_service.algorithms.advantages import gae, whiten


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_gae_equals_numbers_computed_by_hand():
    # δ2 = 1 − 0.6 = 0.4; δ1 = 0.9·0.6 − 0.3 = 0.24; δ0 = 0.9·0.3 − 0.5 = −0.23; γλ = 0.45
    advantages, returns = gae(array(0, 0, 1), array(0.5, 0.3, 0.6), gamma=0.9, lam=0.5)
    np.testing.assert_allclose(advantages, [-0.23 + 0.45 * (0.24 + 0.45 * 0.4), 0.24 + 0.45 * 0.4, 0.4], rtol=1e-6)
    np.testing.assert_allclose(returns, advantages + array(0.5, 0.3, 0.6))


def test_gae_with_lambda_one_is_the_return_minus_the_value():
    rewards, values = array(0.2, -0.1, 1.0, 0.3), array(0.4, 0.1, -0.2, 0.9)
    advantages, _ = gae(rewards, values, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(advantages, np.cumsum(rewards[::-1])[::-1] - values, rtol=1e-6)


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_all_tokens():
    flat = np.concatenate(whiten([array(1, 2, 3), array(10), array(-4, 0)]))
    assert flat.mean() == pytest.approx(0, abs=1e-6)
    assert flat.std() == pytest.approx(1, abs=1e-6)


def test_the_kl_penalty_lowers_the_reward_where_the_policy_left_the_reference():
    config = PPOConfig(kl_coef=0.5, gamma=1.0, lam=1.0, normalize_advantages=False)
    result = ppo.estimate([array(0, 1)], [array(-1.0, -1.0)], [array(-1.4, -1.0)], [array(0, 0)], config)
    np.testing.assert_allclose(result.returns[0], [1 - 0.5 * 0.4, 1.0], rtol=1e-6)
    assert result.kl_to_reference == pytest.approx(0.2)


def test_importance_weights_are_truncated_and_zero_where_the_policy_could_not_have_sampled():
    weights = ppo.importance_weights(array(-1.0, -0.1, -math.inf), array(-1.0, -3.0, -1.0), cap=2.0)
    np.testing.assert_allclose(weights, [1.0, 2.0, 0.0])


def oracle_loss(logprobs, entropies, values, targets, config, tokens):
    """The same loss, token by token in plain Python."""
    total = 0.0
    for k in range(len(logprobs)):
        ratio = math.exp(logprobs[k] - targets.proximal_K[k])
        advantage = float(targets.advantages_K[k])
        clipped = min(max(ratio, 1 - config.clip), 1 + config.clip)
        surrogate = float(targets.weights_K[k]) * min(ratio * advantage, clipped * advantage)
        error = (values[k] - float(targets.returns_K[k])) ** 2
        if config.value_clip:
            old = float(targets.old_values_K[k])
            near = old + min(max(values[k] - old, -config.value_clip), config.value_clip)
            error = max(error, (near - float(targets.returns_K[k])) ** 2)
        total += -surrogate + config.value_coef * 0.5 * error - config.entropy_coef * entropies[k]
    return total / tokens


@pytest.mark.parametrize("value_clip", [0.0, 0.2])
def test_the_loss_equals_an_oracle_token_by_token(value_clip):
    draw = torch.Generator().manual_seed(0)
    k = 50
    rand = [torch.randn(k, generator=draw) for _ in range(8)]
    targets = ppo.Targets(rand[0] - 2, rand[1].abs(), rand[2], rand[3], rand[4])
    logprobs, values, entropies = targets.proximal_K + 0.3 * rand[5], rand[4] + rand[6], rand[7].abs()
    config = PPOConfig(value_clip=value_clip, entropy_coef=0.1)
    total, _ = ppo.loss(logprobs, entropies, values, targets, config, tokens=70)
    expected = oracle_loss(logprobs.tolist(), entropies.tolist(), values.tolist(), targets, config, 70)
    assert float(total) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("advantage", "sign"), [(1.0, -1.0), (-1.0, 1.0)])
def test_the_gradient_raises_what_was_better_than_expected_and_lowers_what_was_worse(advantage, sign):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    one, zero = torch.ones(1), torch.zeros(1)
    targets = ppo.Targets(torch.tensor([-1.0]), one, torch.tensor([advantage]), zero, zero)
    total, _ = ppo.loss(logprobs, zero, zero, targets, PPOConfig(), tokens=1)
    total.backward()
    assert logprobs.grad.item() == pytest.approx(sign)


def test_outside_the_clip_range_there_is_no_gradient_further_out():
    logprobs = torch.tensor([-0.5], requires_grad=True)
    one, zero = torch.ones(1), torch.zeros(1)
    targets = ppo.Targets(torch.tensor([-1.0]), one, one, zero, zero)
    total, sums = ppo.loss(logprobs, zero, zero, targets, PPOConfig(), tokens=1)
    total.backward()
    assert logprobs.grad.item() == 0
    assert float(sums["clip_fraction"]) == 1
