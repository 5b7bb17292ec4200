"""Reward-ranked fine-tuning: which replies reach the bar."""

from __future__ import annotations

import pytest
import torch

from shared.config import RAFTConfig
from tests.support.batches import batch_of, loss_of, precomputed, sequence
from trainer_service.algorithms.raft import RAFT
from trainer_service.algorithms.seam import Batch, Needs
from trainer_service.trajectories import Trajectory


def learnt(batch: Batch, **settings: float) -> dict[int, list[float]]:
    algorithm = RAFT(RAFTConfig(**settings))
    units = algorithm.units(batch)
    constants, _ = algorithm.constants(batch, units, precomputed(batch), {})
    return {unit.members[0]: weights.tolist() for unit, weights in zip(units, constants["weights"], strict=True)}


def of_rewards(*rewards: float) -> Batch:
    return batch_of(*(sequence([reward]) for reward in rewards))


def test_it_needs_no_look():
    assert RAFT(RAFTConfig()).needs == Needs.NOTHING


def test_replies_above_a_bar_are_learnt():
    batch = batch_of(sequence([0, 1.0]), sequence([0, 0.0]), sequence([-1.0]))
    assert learnt(batch, above=0.0) == {0: [1, 1]}
    assert learnt(batch, above=-2.0) == {0: [1, 1], 1: [1, 1], 2: [1]}
    assert learnt(batch, above=1.0) == {}


@pytest.mark.parametrize(
    ("rewards", "quantile", "places"),
    [
        ([0.1, 0.4, 0.2, 0.3], 0.5, [1, 3]),
        ([0.1, 0.4, 0.2, 0.3], 0.75, [1]),
        ([0.1, 0.4, 0.2, 0.3], 0.0, [1, 2, 3]),
        ([0, 1, 0, 0], 0.5, [1]),  # the bar is 0, and the lowest reward is not learnt
        ([1, 1, 0, 1], 0.5, [0, 1, 3]),
        ([1, 1, 1], 0.5, []),
        ([0.5], 0.9, []),
    ],
)
def test_replies_from_a_quantile_on_are_learnt_but_never_those_of_the_lowest_reward(rewards, quantile, places):
    assert sorted(learnt(of_rewards(*rewards), quantile=quantile)) == places


def test_a_batch_without_rewards_teaches_nothing():
    assert learnt(Batch.of([Trajectory(None, [sequence([0])], [0], [None], None)])) == {}


def test_of_a_trajectory_the_good_turns_are_learnt_by_their_own_reward_or_else_by_the_outcome():
    merged = sequence([0, 0, 0, 0, 0], ends=[1, 2, 4])
    batch = Batch.of([Trajectory(None, [merged, sequence([0])], [0, 1, 0, 0], [-1.0, None, None, 0.0], 1.0)])
    assert learnt(batch, above=0.0) == {0: [0, 0, 1, 0, 0], 1: [1]}


def test_the_loss_is_the_mean_negative_log_likelihood_of_the_tokens_that_are_learnt():
    batch = batch_of(sequence([0, 1.0]), sequence([0.0]), sequence([2.0]))
    logprobs = [torch.tensor(values, requires_grad=True) for values in ([-1.0, -2.0], [-9.0], [-6.0])]
    loss, figures = loss_of(RAFT(RAFTConfig(above=0.5)), batch, precomputed(batch), logprobs)
    loss.backward()
    assert loss.item() == pytest.approx(3)
    assert logprobs[0].grad.tolist() == pytest.approx([-1 / 3, -1 / 3])
    assert logprobs[1].grad is None
    assert figures == {"learnt_tokens": 3, "negative_log_likelihood": pytest.approx(3)}
