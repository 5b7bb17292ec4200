"""REINFORCE++, against numbers computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shared.config import ReinforcePPConfig
from tests.support.batches import array, batch_of, loss_of, precomputed, sequence
from trainer_service.algorithms.reinforce_pp import ReinforcePP
from trainer_service.algorithms.seam import Needs


def advantages_of(algorithm: ReinforcePP, batch, seen, memory) -> list[list[float]]:
    return [a.tolist() for a in algorithm.constants(batch, algorithm.units(batch), seen, memory)[0]["advantages"]]


def test_it_needs_no_critic():
    assert ReinforcePP(ReinforcePPConfig()).needs == Needs.PROXIMAL | Needs.REFERENCE
    assert ReinforcePP(ReinforcePPConfig(kl_coef=0)).needs == Needs.PROXIMAL


def test_advantages_are_returns_less_the_mean_over_the_deviation_of_all_tokens():
    batch = batch_of(sequence([0, 1]), sequence([0]), sequence([0]))
    got = advantages_of(ReinforcePP(ReinforcePPConfig(kl_coef=0)), batch, precomputed(batch), {})
    assert got == [pytest.approx([1, 1]), pytest.approx([-1]), pytest.approx([-1])]


def test_the_kl_penalty_of_later_tokens_counts_for_earlier_ones():
    batch = batch_of(sequence([0, 0]), sequence([0, 0]))
    seen = precomputed(batch, reference=[array(-1.4, -1.8), array(-1, -1)])
    got = advantages_of(ReinforcePP(ReinforcePPConfig(kl_coef=0.5)), batch, seen, {})
    given = np.array([-0.6, -0.4, 0, 0])
    assert np.concatenate(got) == pytest.approx((given - given.mean()) / given.std())


def test_a_batch_of_equal_rewards_teaches_whether_they_are_better_than_those_before():
    algorithm, memory = ReinforcePP(ReinforcePPConfig(kl_coef=0, baseline_sequences=4)), {}
    batch = batch_of(sequence([1]), sequence([1]))
    assert advantages_of(algorithm, batch, precomputed(batch), memory) == [[0], [0]], "nothing to compare with"
    worse = batch_of(sequence([0]), sequence([0]))
    assert advantages_of(algorithm, worse, precomputed(worse), memory) == [[-1], [-1]], "mean ½, deviation ½"


def test_loss_and_gradient_equal_numbers_computed_by_hand():
    batch = batch_of(sequence([1.0], behaviour=[-1.5]), sequence([0.0]))
    logprobs = [torch.tensor([math.log(1.1) - 1.0], requires_grad=True), torch.tensor([-1.0], requires_grad=True)]
    algorithm = ReinforcePP(ReinforcePPConfig(kl_coef=0, entropy_coef=0.1))
    loss, figures = loss_of(algorithm, batch, precomputed(batch), logprobs, entropies=[torch.ones(1), torch.ones(1)])
    loss.backward()
    weight = math.exp(0.5)  # π_prox/π_behaviour
    assert loss.item() == pytest.approx((-weight * 1.1 + 1 - 0.1 * 2) / 2)
    assert [one.grad.item() for one in logprobs] == [pytest.approx(-weight * 1.1 / 2), pytest.approx(0.5)]
    assert figures["baseline"] == 0.5
    assert figures["importance_weight"] == pytest.approx((weight + 1) / 2)
