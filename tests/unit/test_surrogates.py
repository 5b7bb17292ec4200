"""Surrogate objectives and KL penalties: numbers computed by hand, and the formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shared.config import GRPOConfig, ReinforcePPConfig
from tests.support.batches import array, batch_of, loss_of, precomputed, sequence
from trainer_service.algorithms.reinforce_pp import ReinforcePP
from trainer_service.algorithms.seam import Now
from trainer_service.algorithms.surrogates import clipped, divergence, policy_loss, surrogate


def clip(ratio: float, advantage: float, *, low=0.2, high=0.2, dual=None) -> tuple[float, float, bool]:
    """J of one token, its gradient with respect to log π, and whether the ratio is outside of the clip range."""
    log_ratio = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    value_K, outside_K = clipped(
        log_ratio, torch.tensor([advantage], dtype=torch.float64), low=low, high=high, dual=dual
    )
    value_K.sum().backward()
    return value_K.item(), log_ratio.grad.item(), outside_K.item()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_at_the_proximal_policy_the_gradient_is_the_advantage(advantage):
    assert clip(1.0, advantage) == (advantage, advantage, False)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (1.5, 2.0, 1.2 * 2, 0),  # far enough already
        (0.5, -2.0, 0.8 * -2, 0),
        (0.5, 2.0, 0.5 * 2, 0.5 * 2),  # on the wrong side: all the way back
        (1.5, -2.0, 1.5 * -2, 1.5 * -2),
    ],
)
def test_outside_of_the_clip_range_there_is_no_gradient_further_out(ratio, advantage, value, gradient):
    assert clip(ratio, advantage) == pytest.approx((value, gradient, True))


def test_clip_higher_leaves_likelier_tokens_more_room():
    assert clip(1.25, 1.0, high=0.28) == pytest.approx((1.25, 1.25, False))
    assert clip(1.25, 1.0) == pytest.approx((1.2, 0, True))
    assert clip(0.75, -1.0, high=0.28) == pytest.approx((-0.8, 0, True))


def test_dual_clip_bounds_the_loss_of_a_bad_token():
    assert clip(5.0, -2.0, dual=3.0) == pytest.approx((-6, 0, True))
    assert clip(2.0, -2.0, dual=3.0) == pytest.approx((-4, -4, True))
    assert clip(5.0, 2.0, dual=3.0) == pytest.approx((2.4, 0, True)), "good tokens know no dual clip"


# two sequences: of two tokens and of one; ratios to π_prox of 1.1, 1.5 and 0.8
RATIOS, OWNERS = [1.1, 1.5, 0.8], [0, 0, 1]


def see(config, advantages, drift=(0.0, 0.0, 0.0)) -> tuple[list[float], list[float], list[bool]]:
    """J of each token, the gradient of their sum with respect to log π, and which are bounded. log π_prox is −1."""
    logprobs = torch.tensor([math.log(r) - 1 for r in RATIOS], dtype=torch.float64, requires_grad=True)
    now = Now(logprobs, 0 * logprobs, None, torch.tensor(OWNERS), torch.arange(2))
    constants = {
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "drift": torch.tensor(drift, dtype=torch.float64),
    }
    value_K, bounded_K = surrogate(now, logprobs + 1, constants, config)
    (gradient,) = torch.autograd.grad(value_K.sum(), logprobs)
    return value_K.tolist(), gradient.tolist(), bounded_K.tolist()


def settings(**given) -> ReinforcePPConfig:
    return ReinforcePPConfig.model_validate({"kl_coef": 0, **given})


def test_cispo_caps_the_weight_and_keeps_every_gradient():
    _, gradient, bounded = see(settings(surrogate="cispo", clip_high=0.3), [2.0, 1.0, -1.0])
    assert gradient == pytest.approx([1.1 * 2, 1.3 * 1, -0.8]), "1.5 counts as 1.3, and still moves its token"
    assert bounded == [False, True, False]


def test_gspo_clips_by_the_geometric_mean_of_the_sequence():
    mean = math.sqrt(1.1 * 1.5)
    value, gradient, bounded = see(settings(surrogate="gspo", clip=0.3), [1.0, 2.0, 1.0])
    assert value == pytest.approx([mean, 2 * mean, 0.8])
    assert gradient == pytest.approx([mean, 2 * mean, 0.8]), "each token by the ratio of its sequence"
    assert bounded == [False, False, False]
    _, gradient, bounded = see(settings(surrogate="gspo", clip=0.2), [1.0, 2.0, 1.0])
    assert gradient == pytest.approx([0, 0, 0.8]), "1.28 is outside: the whole sequence stays"
    assert bounded == [True, True, False]


def test_gspo_with_a_mean_over_sequences_has_the_gradient_of_the_sequence_ratio():
    logprobs = torch.tensor([math.log(r) - 1 for r in RATIOS], dtype=torch.float64, requires_grad=True)
    ratio = ((logprobs[:2] + 1).mean()).exp()  # Zheng et al. 2025, eq. 7
    (expected,) = torch.autograd.grad(3.0 * ratio, logprobs)
    _, gradient, _ = see(settings(surrogate="gspo", clip=0.9), [3.0, 3.0, 0.0])
    assert np.array(gradient[:2]) / 2 == pytest.approx(expected[:2].numpy())


def test_topr_tapers_old_failures_and_keeps_old_successes():
    drift = [math.log(0.5), 0.0, math.log(0.9)]  # π_prox/π_behaviour
    _, gradient, bounded = see(settings(surrogate="topr"), [-1.0, -2.0, 1.0], drift)
    taper = 1.1 * 1.5 * 0.5  # of the whole sequence
    assert gradient == pytest.approx([-taper, -2 * taper, 1.0])
    assert bounded == [True, True, False]
    _, gradient, _ = see(settings(surrogate="topr"), [-1.0, -2.0, -1.0])
    assert gradient == pytest.approx([-1.0, -2.0, -0.8]), "1.65 counts as 1"
    _, gradient, _ = see(settings(surrogate="topr"), [-1.0, 1.0, -1.0], [-math.inf, 0.0, 0.0])
    assert gradient == pytest.approx([0, 1, -0.8]), "what π_prox could not say again is no failure of it"


def test_opmd_pulls_back_in_proportion_to_the_sequence_drift():
    config = settings(surrogate="opmd", mirror_coef=0.5)
    _, gradient, _ = see(config, [1.0, 2.0, -1.0])
    logprobs = torch.tensor([math.log(r) - 1 for r in RATIOS], dtype=torch.float64, requires_grad=True)
    moved = torch.stack([(logprobs[:2] + 1).sum(), logprobs[2] + 1])
    objective = (torch.tensor([1.0, 2.0, -1.0]) * logprobs).sum() - 0.5 / 2 * moved.square().sum()
    assert gradient == pytest.approx(torch.autograd.grad(objective, logprobs)[0].tolist())


@pytest.mark.parametrize("name", ["clip", "cispo", "gspo", "topr", "opmd"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_at_the_policy_that_sampled_every_surrogate_has_the_gradient_of_reinforce(name, advantage):
    logprobs = torch.full((3,), -1.0, requires_grad=True)
    now = Now(logprobs, 0 * logprobs, None, torch.tensor(OWNERS), torch.arange(2))
    constants = {"advantages": torch.full((3,), advantage), "drift": torch.zeros(3)}
    value_K, bounded_K = surrogate(now, logprobs + 1, constants, settings(surrogate=name))
    value_K.sum().backward()
    assert logprobs.grad.tolist() == [advantage] * 3
    assert not bounded_K.any()


@pytest.mark.parametrize("name", ["clip", "cispo", "gspo", "topr", "opmd"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("distance", [1e6, -1e6])
def test_a_ratio_beyond_all_numbers_leaves_objective_and_gradient_finite(name, advantage, distance):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    constants = {name: torch.tensor([value]) for name, value in (("advantages", advantage), ("weights", 1.0))}
    constants |= {"proximal": logprobs.detach() - distance, "drift": torch.tensor([-math.inf])}
    now = Now(logprobs, torch.zeros(1), None, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    loss, sums = policy_loss(now, constants, settings(surrogate=name))
    loss.backward()
    assert all(math.isfinite(float(value)) for value in (loss.detach(), logprobs.grad, *sums.values()))


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) - 1 + 0.5, 1 - math.exp(-0.5))],
)
def test_estimators_of_the_kl_divergence_equal_numbers_computed_by_hand(estimator, value, slope):
    gap = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    got = divergence(gap, estimator)
    got.sum().backward()
    assert (got.item(), gap.grad.item()) == pytest.approx((value, slope))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_mean_of_an_estimator_is_the_divergence_of_two_distributions(estimator):
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.45, 0.33, 0.22])
    gap = torch.from_numpy(np.log(p / q))
    tolerance = 0 if estimator != "k2" else 0.05  # k2 has a bias of the third order
    exact = (p * np.log(p / q)).sum()
    assert (p * divergence(gap, estimator).numpy()).sum() == pytest.approx(exact, rel=1e-9 + tolerance)


def loss_and_gradients(config) -> tuple[float, list[float]]:
    """Of a sequence of two tokens with the advantages 1, −1 and one of a single token with 0; log π_ref is −1.5."""
    batch = batch_of(sequence([0.0, 0.0]), sequence([0.0]))
    logprobs = [torch.full((2,), -1.2, requires_grad=True), torch.full((1,), -0.9, requires_grad=True)]
    algorithm = ReinforcePP(config)
    seen = precomputed(batch, reference=[array(-1.5, -1.5), array(-1.5)], proximal=[array(-1.2, -1.2), array(-0.9)])
    loss, _ = loss_of(algorithm, batch, seen, logprobs)
    loss.backward()
    return loss.item(), [value for one in logprobs for value in one.grad.tolist()]


@pytest.mark.parametrize(
    ("mean", "shares"),
    [("tokens", [1 / 3] * 3), ("sequences", [1 / 4, 1 / 4, 1 / 2]), ("constant", [1 / 20] * 3)],
)
def test_means_are_over_tokens_sequences_or_a_constant(mean, shares):
    """β = 1 and no advantages: k2's gradient is log π − log π_ref."""
    config = settings(kl_coef=1.0, kl="k2", kl_in="loss", mean=mean, mean_tokens=10)
    loss, gradients = loss_and_gradients(config)
    gaps = np.array([0.3, 0.3, 0.6])
    assert loss == pytest.approx(float((np.array(shares) * gaps**2 / 2).sum()))
    assert gradients == pytest.approx((np.array(shares) * gaps).tolist())


def test_a_k1_penalty_in_the_loss_is_refused_at_the_key_that_asks_for_it():
    with pytest.raises(ValueError, match=r"trainer\.grpo\.kl=k1 with kl_in=loss .* set kl: k2 or k3, or kl_in: reward"):
        GRPOConfig(kl="k1").check("trainer.grpo")
