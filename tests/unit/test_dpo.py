"""Direct preference optimization: which pairs, and the loss against hand-computed numbers and the formula."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from shared.config import DPOConfig
from tests.support.batches import array, batch_of, loss_of, precomputed, sequence
from trainer_service.algorithms.dpo import DPO
from trainer_service.algorithms.seam import Batch, Needs, Said, Unit
from trainer_service.trajectories import Trajectory


def pairs_of(batch: Batch, **settings: bool) -> list[tuple[int, ...]]:
    return [unit.members for unit in DPO(DPOConfig(**settings)).units(batch)]


def test_it_needs_the_base_model_and_for_its_bound_the_policy():
    assert DPO(DPOConfig(clip=0)).needs == Needs.REFERENCE
    assert DPO(DPOConfig()).needs == Needs.REFERENCE | Needs.PROXIMAL


def test_a_preference_does_not_push_a_token_that_it_has_moved_beyond_the_clip():
    """Within a batch, from −1 each: the first token of both replies has gone too far, and the last the other way."""
    batch = replace(batch_of(sequence([0] * 3), sequence([0] * 3)), pairs=[(0, 1)])
    moved = [(0.25, 0.1, -2.0), (-0.25, -0.1, 2.0)]  # |log 1.2| is 0.18
    logprobs = [torch.tensor([x - 1 for x in one], requires_grad=True) for one in moved]
    loss, figures = loss_of(DPO(DPOConfig(beta=0.5, clip=0.2)), batch, precomputed(batch), logprobs)
    loss.backward()
    margin = 0.5 * 2 * (0.25 + 0.1 - 2)
    assert figures["margin"] == pytest.approx(margin), "the value of a reply is that of all of its tokens"
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-margin)))
    slope = 0.5 / (1 + math.exp(margin))
    assert logprobs[0].grad.tolist() == pytest.approx([0, -slope, -slope])
    assert logprobs[1].grad.tolist() == pytest.approx([0, slope, slope])


def test_each_preference_is_one_unit_however_often_it_was_sent():
    batch = replace(batch_of(*(sequence([0.0]) for _ in range(3))), pairs=[(2, 0), (1, 0), (2, 0)])
    assert DPO(DPOConfig()).units(batch) == [Unit((2, 0), said=Said.PREFERENCE), Unit((1, 0), said=Said.PREFERENCE)]


def test_one_pair_by_hand():
    """Δ = (−1 −1 − −3) − (−2 − −4) = 1 − 2 = −1, and −log σ(−½) = log(1 + √e)."""
    batch = replace(batch_of(sequence([0, 0]), sequence([0])), pairs=[(0, 1)])
    logprobs = [torch.tensor(values, requires_grad=True) for values in ([-1.0, -1.0], [-2.0])]
    seen = precomputed(batch, reference=[array(-1.0, -2.0), array(-4.0)])
    loss, figures = loss_of(DPO(DPOConfig(beta=0.5, clip=0)), batch, seen, logprobs)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(1 + math.sqrt(math.e)), rel=1e-6)
    slope = 0.5 * (1 - 1 / (1 + math.exp(0.5)))  # β σ(−β Δ)
    assert logprobs[0].grad.tolist() == pytest.approx([-slope, -slope])
    assert logprobs[1].grad.tolist() == pytest.approx([slope])
    assert figures == {
        "preferences": 1,
        "preference_loss": pytest.approx(loss.item()),
        "margin": pytest.approx(-0.5),
        "accuracy": 0,
    }


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_and_gradient_equal_the_formula_in_float64(smoothing):
    draw = np.random.default_rng(3)
    lengths = [3, 1, 5, 2]
    batch = batch_of(*(sequence([0.0] * length) for length in lengths))
    pairs = [(0, 1), (2, 1), (3, 2)]  # sequences in two pairs
    ours, theirs = ([draw.normal(-2, 1, length).astype(np.float32) for length in lengths] for _ in range(2))
    logprobs = [torch.tensor(one, requires_grad=True) for one in ours]
    config = DPOConfig(beta=0.3, clip=0, label_smoothing=smoothing)
    loss, _ = loss_of(DPO(config), replace(batch, pairs=pairs), precomputed(batch, reference=theirs), logprobs)
    loss.backward()

    exact = [torch.tensor(one.astype(np.float64), requires_grad=True) for one in ours]
    gained = [one.sum() - float(other.astype(np.float64).sum()) for one, other in zip(exact, theirs, strict=True)]
    p = [1 / (1 + torch.exp(-0.3 * (gained[better] - gained[worse]))) for better, worse in pairs]
    expected = -sum((1 - smoothing) * torch.log(one) + smoothing * torch.log(1 - one) for one in p) / 3
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for one, other in zip(logprobs, exact, strict=True):
        np.testing.assert_allclose(one.grad.numpy(), other.grad.numpy(), rtol=1e-4)


def run(task: str | None, reward: float | None, prompt: int = 0, sequences: int = 1) -> Trajectory:
    one = sequence([0.0])
    one = replace(one, token_ids=one.token_ids + prompt)
    turns = list(range(sequences))
    return Trajectory(task, [one] * sequences, turns, [None] * sequences, reward)


def test_the_best_run_of_a_task_is_preferred_to_its_worst_where_that_is_asked_for():
    runs = [run("a", 0.5), run("a", 1.0), run("a", 0.0), run("b", 1.0), run("b", 1.0), run(None, 0.0), run(None, 1.0)]
    batch = Batch.of(runs)
    assert pairs_of(batch) == []
    assert pairs_of(batch, best_over_worst=True) == [(1, 2)]


def test_runs_are_compared_when_they_began_alike_and_are_one_sequence_each():
    batch = Batch.of([run("a", 1.0), run("a", 0.0, prompt=7), run("a", None), run("a", -1.0, sequences=2)])
    assert pairs_of(batch, best_over_worst=True) == []


def test_runs_of_two_groups_of_keys_are_not_compared_where_these_name_their_tasks_alike():
    runs = [replace(run("a", reward), key_group=group) for reward, group in ((1.0, "x"), (0.0, "y"), (0.5, "x"))]
    assert pairs_of(Batch.of(runs), best_over_worst=True) == [(0, 2)]


def test_a_preference_between_two_runs_overrides_their_rewards():
    batch = replace(Batch.of([run("a", 1.0), run("a", 0.0)]), pairs=[(1, 0)])
    assert pairs_of(batch, best_over_worst=True) == [(1, 0)]


def test_it_learns_from_rewards_only_where_runs_are_compared():
    assert DPOConfig().learned == {"preferred_over", "correction"} and DPOConfig().together == "trajectory"
    comparing = DPOConfig(best_over_worst=True)
    assert comparing.learned == {"preferred_over", "correction", "reward", "rating", "metric"}
    assert comparing.together == "task"
