"""Losses and gradients of whole algorithms, against their formulas written out token by token in float64."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import pytest
import torch

from shared.config import TrainerConfig
from tests.support.batches import loss_of, precomputed, rows_batch
from tests.unit.test_groups import row, two_turns
from trainer_service.algorithms.registry import algorithm
from trainer_service.algorithms.seam import Batch

CLIP, HIGH, DUAL, CAP, BETA = 0.2, 0.28, 1.5, 1.2, 0.05
POLICY = {"clip": CLIP, "clip_high": HIGH, "dual_clip": DUAL, "importance_cap": CAP, "kl_coef": BETA}
ALONE = {"baseline_sequences": 1, "outlier_bound": None}  # no moments of other batches
# of each run of task a: the rewards of its two turns
TURNS = {"x": (1.0, 0.0), "y": (0.0, 1.0), "z": (0.3, 0.5)}

Numbers = dict[str, list[torch.Tensor]]
Advantages = Callable[[Numbers], list[torch.Tensor]]  # of each sequence [A], or [1] for all of its actions


def runs() -> Batch:
    """Three runs of one task, each one sequence of two turns of two tokens."""
    return rows_batch(
        [one for place, (run, given) in enumerate(TURNS.items()) for one in two_turns(10 * place + 1, run, given)]
    )


def global_baseline(numbers: Numbers) -> list[torch.Tensor]:
    """(G_t − mean) / std over all tokens, with the KL penalty in the rewards (REINFORCE++)."""
    found = []
    for (first, second), proximal, reference in zip(
        TURNS.values(), numbers["proximal"], numbers["reference"], strict=True
    ):
        shaped = torch.tensor([0, first, 0, second], dtype=torch.float64) - BETA * (proximal - reference)
        found.append(shaped.flip(0).cumsum(0).flip(0))
    tokens = torch.cat(found)
    return [(one - tokens.mean()) / tokens.std(correction=0) for one in found]


def leave_one_out(_: Numbers) -> list[torch.Tensor]:
    """R less the mean of the others' R (RLOO)."""
    earned = [sum(given) for given in TURNS.values()]
    others = [statistics.fmean(earned[:n] + earned[n + 1 :]) for n in range(len(earned))]
    return [torch.tensor([own - mean], dtype=torch.float64) for own, mean in zip(earned, others, strict=True)]


def by_turn(_: Numbers) -> list[torch.Tensor]:
    """What a turn and those after it earned, less the mean of that turn in all runs, over their deviation."""
    after = [(first + second, second) for first, second in TURNS.values()]
    columns = [(statistics.fmean(column), statistics.stdev(column)) for column in zip(*after, strict=True)]
    scored = [[(value - m) / s for value, (m, s) in zip(own, columns, strict=True)] for own in after]
    return [torch.tensor(own, dtype=torch.float64).repeat_interleave(2) for own in scored]


def teachers_opinion(numbers: Numbers) -> list[torch.Tensor]:
    """log p less log π of the sampled token, clipped, and the KL penalty of each token."""
    triples = zip(numbers["teacher"], numbers["proximal"], numbers["reference"], strict=True)
    return [(p - own).clamp(-0.5, 0.5) - BETA * (own - base) for p, own, base in triples]


def draw_numbers(batch: Batch) -> Numbers:
    draw = np.random.default_rng(5)
    names = ("now", "proximal", "processed", "reference", "teacher")
    return {
        name: [torch.from_numpy(draw.normal(-1, 0.4, len(one.actions)).astype(np.float32)) for one in batch.sequences]
        for name in names
    }


def policy_loss(numbers: Numbers, advantages: list[torch.Tensor], kl_in_loss: bool) -> tuple[float, np.ndarray]:
    """−E[ w J ] + β E[ KL ] over all tokens, and its gradient by log π."""
    now = [one.double().requires_grad_() for one in numbers["now"]]
    terms = []
    for place, own in enumerate(now):
        ratio = torch.exp(own - numbers["proximal"][place].double())
        gained = torch.minimum(ratio * advantages[place], ratio.clamp(1 - CLIP, 1 + HIGH) * advantages[place])
        bounded = torch.where(advantages[place] < 0, torch.maximum(gained, DUAL * advantages[place]), gained)
        weight = torch.exp(numbers["processed"][place].double() + 1).clamp(max=CAP)  # rows were sampled with log μ = −1
        behind = numbers["reference"][place].double() - own
        terms.append(-weight * bounded + (BETA * (behind.exp() - behind - 1) if kl_in_loss else 0))
    loss = torch.cat(terms).mean()
    loss.backward()
    return loss.item(), np.concatenate([one.grad.numpy() for one in now if one.grad is not None])


@pytest.mark.parametrize(
    ("name", "settings", "advantages", "kl_in_loss"),
    [
        ("reinforce_pp", ALONE, global_baseline, False),
        ("rloo", ALONE, leave_one_out, True),
        ("step_grpo", ALONE, by_turn, True),
        ("distill", {"path": "teacher", "advantage_bound": 0.5}, teachers_opinion, False),
    ],
)
def test_loss_and_gradient_equal_the_formula(
    name: str, settings: dict[str, object], advantages: Advantages, kl_in_loss: bool
):
    batch = runs()
    numbers = draw_numbers(batch)
    page = algorithm(name, TrainerConfig.model_validate({"algorithm": name, name: {**POLICY, **settings}}))
    known = {key: [one.numpy() for one in given] for key, given in numbers.items() if key != "now"}
    logprobs = [one.clone().requires_grad_() for one in numbers["now"]]
    loss, _ = loss_of(page, batch, precomputed(batch, **known), logprobs)
    loss.backward()

    doubles = {key: [one.double() for one in given] for key, given in numbers.items()}
    expected, gradient = policy_loss(numbers, advantages(doubles), kl_in_loss)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    found = np.concatenate([one.grad.numpy() for one in logprobs if one.grad is not None])
    np.testing.assert_allclose(found, gradient, atol=1e-6)
    assert np.abs(gradient).max() > 0.01


def test_loss_and_gradient_of_raft_equal_the_likelihood_of_the_better_half():
    rewards = [0.1, 0.9, 0.5, 0.7]
    batch = rows_batch([row(n + 1, None, None, reward) for n, reward in enumerate(rewards)])
    now = draw_numbers(batch)["now"]
    page = algorithm("raft", TrainerConfig.model_validate({"algorithm": "raft", "raft": {"quantile": 0.5}}))
    logprobs = [one.clone().requires_grad_() for one in now]
    loss, _ = loss_of(page, batch, precomputed(batch), logprobs)
    loss.backward()
    learnt = [now[1].double(), now[3].double()]
    assert loss.item() == pytest.approx(-torch.cat(learnt).mean().item(), rel=1e-6)
    gradients = [np.zeros(2) if one.grad is None else one.grad.numpy() for one in logprobs]
    np.testing.assert_allclose(gradients, [[0, 0], [-0.25, -0.25], [0, 0], [-0.25, -0.25]])
