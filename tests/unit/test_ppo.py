"""PPO, against numbers computed by hand and against an oracle in float64, token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shared.config import PPOConfig
from tests.support.batches import array, batch_of, loss_of, precomputed, sequence
from trainer_service.algorithms.ppo import PPO
from trainer_service.algorithms.seam import Needs

PLAIN = {"kl_coef": 0.0, "lam": 1.0, "normalize_advantages": False, "normalize_returns": False, "value_clip": 0.0}


def plain(**settings: object) -> PPO:
    return PPO(PPOConfig(**{**PLAIN, **settings}))


def constants_of(algorithm: PPO, batch, seen, memory=None):
    return algorithm.constants(batch, algorithm.units(batch), seen, {} if memory is None else memory)


def test_it_needs_the_base_model_and_the_entropys_gradient_only_where_they_count():
    assert PPO(PPOConfig(kl_coef=0.0)).needs == Needs.PROXIMAL | Needs.VALUES
    assert PPO(PPOConfig(entropy_coef=0.1)).needs == Needs.PROXIMAL | Needs.VALUES | Needs.REFERENCE | Needs.ENTROPY


def test_a_trajectory_without_a_reward_is_not_trained():
    batch = batch_of(sequence([0, 1]), sequence([0, 0]))
    batch.trajectories[1].turn_rewards[:] = [None]
    assert [unit.members for unit in plain().units(batch)] == [(0,)]


def oracle(config, rewards, proximal, processed, behaviour, reference, values, now, now_values, entropies):
    """The loss and its gradients, in plain Python: one list of tokens for each sequence."""
    tokens = []
    for s in range(len(rewards)):
        shaped = [r - config.kl_coef * (p - q) for r, p, q in zip(rewards[s], proximal[s], reference[s], strict=True)]
        following, next_value = 0.0, 0.0
        for t in reversed(range(len(shaped))):
            following = shaped[t] + config.gamma * next_value - values[s][t] + config.gamma * config.lam * following
            next_value = values[s][t]
            bound = config.return_clip
            advantage = min(max(following, -bound), bound)
            target = min(max(following + next_value, -bound), bound)
            tokens.append((s, t, advantage, target))
    mean = sum(token[2] for token in tokens) / len(tokens)
    std = math.sqrt(sum((token[2] - mean) ** 2 for token in tokens) / len(tokens))
    loss, gradients = 0.0, [[0.0] * len(r) for r in rewards]
    for s, t, raw, target in tokens:
        advantage = (raw - mean) / std if config.normalize_advantages else raw
        ratio = math.exp(now[s][t] - proximal[s][t])
        weight = min(math.exp(processed[s][t] - behaviour[s][t]), config.importance_cap)
        high = 1 + (config.clip_high or config.clip)
        inside = min(max(ratio, 1 - config.clip), high)
        objective, slope = min((ratio * advantage, ratio * advantage), (inside * advantage, 0.0))
        if inside == ratio:
            slope = ratio * advantage
        if advantage < 0 and config.dual_clip is not None and objective < config.dual_clip * advantage:
            objective, slope = config.dual_clip * advantage, 0.0
        old, new = values[s][t], now_values[s][t]
        error = (new - target) ** 2
        if config.value_clip:
            near = old + min(max(new - old, -config.value_clip), config.value_clip)
            error = max(error, (near - target) ** 2)
        loss += -weight * objective + config.value_coef * 0.5 * error - config.entropy_coef * entropies[s][t]
        gradients[s][t] = -weight * slope / len(tokens)
    return loss / len(tokens), gradients


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"value_clip": 0.0, "normalize_advantages": False, "gamma": 0.9},
        {"clip_high": 0.28, "dual_clip": 1.5, "entropy_coef": 0.1, "return_clip": 0.5},
        {"dual_clip": None, "kl_coef": 0.0, "lam": 1.0},
    ],
)
def test_loss_and_gradient_equal_an_oracle_token_by_token(settings):
    draw = np.random.default_rng(0)
    lengths = (3, 7, 1, 5)

    def arrays(scale: float = 1.0, shift: float = 0.0) -> list[np.ndarray]:
        return [(shift + scale * draw.normal(size=length)).astype(np.float32) for length in lengths]

    config = PPOConfig(**{"kl_coef": 0.3, "normalize_returns": False, "outlier_bound": None, **settings})
    rewards, behaviour, proximal, processed = arrays(), arrays(0.5, -3), arrays(0.5, -3), arrays(0.5, -3)
    reference, values, entropies = arrays(0.5, -3), arrays(), arrays()
    now = [torch.tensor(p + 0.4 * draw.normal(size=len(p)), requires_grad=True) for p in proximal]
    now_values = [torch.tensor(v + 0.4 * draw.normal(size=len(v))) for v in values]
    batch = batch_of(*(sequence(r.tolist(), b.tolist()) for r, b in zip(rewards, behaviour, strict=True)))
    seen = precomputed(batch, proximal=proximal, processed=processed, reference=reference, values=values)
    loss, _ = loss_of(
        PPO(config), batch, seen, now, entropies=[torch.from_numpy(e) for e in entropies], values=now_values
    )
    loss.backward()
    numbers = (rewards, proximal, processed, behaviour, reference, values, now, now_values, entropies)
    expected, gradients = oracle(config, *([a.tolist() for a in arrays] for arrays in numbers))
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    for one, gradient in zip(now, gradients, strict=True):
        np.testing.assert_allclose(one.grad.numpy(), gradient, rtol=1e-4, atol=1e-7)


def test_advantages_and_returns_are_bounded():
    batch = batch_of(sequence([0, 1e6]), sequence([0, 0]))
    constants, _ = constants_of(plain(return_clip=5.0, outlier_bound=None), batch, precomputed(batch))
    assert constants["returns"][0].tolist() == constants["advantages"][0].tolist() == [5, 5]


def test_one_reward_of_a_million_leaves_the_others_their_advantages():
    draw = np.random.default_rng(0)
    rewards = [*draw.choice([0.0, 1.0], 63).tolist(), 1e6]
    batch = batch_of(*(sequence([0, reward]) for reward in rewards))
    advantages = constants_of(PPO(PPOConfig(kl_coef=0.0)), batch, precomputed(batch))[0]["advantages"]
    apart = np.ptp([advantage[-1] for advantage in advantages[:-1]])
    assert apart > 0.5, "good and bad ones are told apart"
    assert abs(advantages[-1][-1]) < 10


def test_the_critic_learns_returns_of_mean_0_and_deviation_1_and_its_values_are_scaled_back():
    algorithm, memory = plain(normalize_returns=True), {}
    batch = batch_of(sequence([10]), sequence([14]))
    first, _ = constants_of(algorithm, batch, precomputed(batch), memory)
    np.testing.assert_allclose(np.concatenate(first["returns"]), [-1, 1])
    assert np.concatenate(first["advantages"]).tolist() == [10, 14], "nothing is expected at first"
    # the critic says −1 and 0.5 now: 12 ± 2 make these 10 and 13
    second, figures = constants_of(algorithm, batch, precomputed(batch, values=[array(-1), array(0.5)]), memory)
    np.testing.assert_allclose(np.concatenate(second["advantages"]), [0, 1], atol=1e-6)
    np.testing.assert_allclose(np.concatenate(second["returns"]), [-1, 1])
    assert figures["explained_variance"] == pytest.approx(1 - 0.25 / 4)


def test_returns_that_never_differ_are_learnt_as_zero_and_not_blown_up():
    algorithm, memory = plain(normalize_returns=True), {}
    batch = batch_of(sequence([0.7]), sequence([0.7]))
    for _ in range(2):
        constants, _ = constants_of(algorithm, batch, precomputed(batch), memory)
    np.testing.assert_allclose(np.concatenate(constants["returns"]), [0, 0], atol=1e-6)
    np.testing.assert_allclose(np.concatenate(constants["advantages"]), [0, 0], atol=1e-6)


def test_while_the_critic_warms_up_the_policy_has_no_gradient():
    algorithm, memory = plain(critic_warmup=1, entropy_coef=0.1), {}
    batch = batch_of(sequence([1.0]))
    gradients = []
    for _ in range(2):
        logprobs, values, entropies = (torch.full((1,), -1.0, requires_grad=True) for _ in range(3))
        loss, _ = loss_of(
            algorithm, batch, precomputed(batch), [logprobs], entropies=[entropies], values=[values], memory=memory
        )
        loss.backward()
        gradients.append((logprobs.grad.item(), entropies.grad.item(), values.grad.item()))
    assert gradients == [(0, 0, pytest.approx(-1)), (pytest.approx(-1), pytest.approx(-0.1), pytest.approx(-1))]
