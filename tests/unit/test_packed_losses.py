"""A minibatch has one loss and one gradient, however it is packed and whichever ranks compute its parts."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from shared.config import TrainerConfig
from tests.support.batches import precomputed, rows_batch
from tests.unit.test_groups import row, two_turns
from trainer_service.algorithms.registry import algorithm
from trainer_service.packing import pack
from trainer_service.parts import Part, Work

NAMES = ["ppo", "reinforce_pp", "spo", "grpo", "rloo", "step_grpo"]
SURROGATES = ["clip", "cispo", "gspo", "topr", "opmd"]
MEANS = ["tokens", "sequences", "constant"]
CARE = {"importance": "sequence", "importance_outside": "mask", "kl": "k2", "kl_in": "loss", "entropy_coef": 0.01}


def gradients(name: str, settings: dict[str, object], shares: list[list[int]], budget: int) -> tuple[float, np.ndarray]:
    """The loss of one minibatch of the whole batch, summed over ranks and micro-batches, and its gradient.

    shares: the places that each rank computes.
    """
    rows = [*two_turns(1, "x", (1.0, 0.0)), *two_turns(11, "y", (0.0, 1.0)), *two_turns(21, "z", (0.3, 0.2))]
    batch = rows_batch([*rows, row(31, "b", "1", 1.0), row(32, None, None, -1.0)])
    draw = np.random.default_rng(3)
    said = [[draw.normal(-1, 0.2, len(one.actions)).astype(np.float32) for one in batch.sequences] for _ in range(5)]
    logprobs = [torch.from_numpy(one).requires_grad_() for one in said[0]]
    seen = precomputed(batch, proximal=said[1], processed=said[2], reference=said[3], values=said[4])
    page = algorithm(name, TrainerConfig.model_validate({"algorithm": name, name: settings}))
    units = page.units(batch)
    work = Work(Part(page), units, *page.constants(batch, units, seen, {}))
    size, total = work.size_of(range(len(batch.sequences))), 0.0
    for places in shares:
        for micro in pack(batch.sequences, places, budget):
            found = torch.cat([logprobs[place] for place in micro.members])
            scores = {"logprobs": found, "entropy": -found, "values": 0.5 * found}
            loss = work.loss(micro, scores, size)
            loss.backward()
            total += loss.item()
    return total, np.concatenate([one.grad.numpy() for one in logprobs])


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradient_are_the_same_for_every_budget_and_for_one_and_two_ranks(name):
    for surrogate, mean in product(SURROGATES, MEANS):
        settings = {"surrogate": surrogate, "mean": mean, **CARE}
        loss, gradient = gradients(name, settings, [[0, 1, 2, 3, 4]], 1_000_000)
        assert np.abs(gradient).max() > 1e-5
        for shares, budget in product([[[0, 1, 2, 3, 4]], [[3, 0], [4, 2, 1]]], [1, 8]):
            again, moved = gradients(name, settings, shares, budget)
            assert again == pytest.approx(loss, rel=1e-5, abs=1e-7), (surrogate, mean)
            np.testing.assert_allclose(moved, gradient, rtol=1e-4, atol=1e-7)
