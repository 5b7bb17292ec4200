"""Kahneman-Tversky optimization: mismatched pairs, the balance of ratings, and the loss against the formula."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from shared.config import KTOConfig
from tests.support.batches import array, batch_of, loss_of, precomputed, sequence
from trainer_service.algorithms.kto import KTO, WINDOW
from trainer_service.algorithms.seam import Batch, Needs

ALGORITHM = KTO(KTOConfig(beta=0.5, clip=0, taper=False))  # as in the paper


def rated(*sequences, **ratings: bool) -> Batch:
    return replace(batch_of(*sequences), ratings={int(name[1:]): up for name, up in ratings.items()})


def test_it_needs_the_policy_and_the_base_model():
    assert ALGORITHM.needs == Needs.PROXIMAL | Needs.REFERENCE


def test_each_prompt_is_looked_at_with_the_next_ones_answer():
    second = replace(sequence([0, 0]), token_ids=np.array([7, 8, 9, 40, 41]), actions=np.array([3, 4]))
    batch = rated(sequence([0]), sequence([0]), second, s0=True, s2=False)
    units = ALGORITHM.units(batch)
    assert [(unit.members, unit.trained) for unit in units] == [
        ((0,), True),
        ((2,), True),
        ((3,), False),
        ((4,), False),
    ]
    first, other = batch.sequences[3:]
    assert first.token_ids.tolist() == [0, 1, 40, 41] and first.actions.tolist() == [2, 3]
    assert other.token_ids.tolist() == [7, 8, 9, 2] and other.actions.tolist() == [3]


def test_a_mismatched_pair_is_no_longer_than_the_longest_sequence():
    long = replace(sequence([0, 0]), token_ids=np.arange(10), actions=np.array([8, 9]))
    wordy = replace(sequence([0] * 8), token_ids=np.arange(10), actions=np.arange(2, 10))
    batch = rated(long, wordy, s0=True, s1=True)
    units = ALGORITHM.units(batch)
    assert [len(batch.sequences[unit.members[0]].token_ids) for unit in units] == [10, 10, 10, 4]
    cut = batch.sequences[2]
    assert cut.token_ids.tolist() == [6, 7, *range(2, 10)], "the end of the prompt stays"
    assert cut.actions.tolist() == list(range(2, 10))


def test_one_rating_alone_has_no_mismatched_pair_and_no_kl():
    batch = rated(sequence([0]), s0=True)
    loss, figures = loss_of(ALGORITHM, batch, precomputed(batch), [torch.tensor([-0.5])])
    assert loss.item() == pytest.approx(1 - 1 / (1 + math.exp(-0.25)))  # r = −0.5 − −1
    assert figures["kl"] == 0


def test_two_ratings_by_hand():
    """z = mean(3 − 1, 0) = 1. Up: r = 2, 1 − σ(½ (2 − 1)). Down: r = −1, 1 − σ(½ (1 − −1))."""
    batch = rated(sequence([0]), sequence([0]), s0=True, s1=False)
    logprobs = [torch.tensor([value], requires_grad=True) for value in (-1.0, -4.0)]
    reference = [array(-3.0), array(-3.0), array(-3.0), array(-2.0)]
    proximal = [array(-9.0), array(-9.0), array(-1.0), array(-2.0)]  # the last two are the mismatched ones
    loss, figures = loss_of(ALGORITHM, batch, precomputed(batch, reference=reference, proximal=proximal), logprobs)
    loss.backward()
    up, down = 1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(-1))
    assert figures["kl"] == pytest.approx(1)
    assert loss.item() == pytest.approx((1 - up + 1 - down) / 2)
    assert logprobs[0].grad.item() == pytest.approx(-0.5 * up * (1 - up) / 2)
    assert logprobs[1].grad.item() == pytest.approx(0.5 * down * (1 - down) / 2)
    assert figures["accuracy"] == 1 and figures["up_share"] == 0.5


def test_loss_and_gradient_equal_the_formula_in_float64():
    draw = np.random.default_rng(5)
    lengths, ups = [3, 1, 4, 2, 5], [True, False, True, True, False]
    batch = rated(*(sequence([0.0] * n) for n in lengths), **{f"s{n}": up for n, up in enumerate(ups)})
    units = ALGORITHM.units(batch)
    mismatched = [len(batch.sequences[unit.members[0]].actions) for unit in units if not unit.trained]
    assert mismatched == [1, 4, 2, 5, 3]
    fresh = rated(*(sequence([0.0] * n) for n in lengths), **{f"s{n}": up for n, up in enumerate(ups)})
    proximal, reference = (
        [draw.normal(-2, 1, n).astype(np.float32) for n in (*lengths, *mismatched)] for _ in range(2)
    )
    ours = [draw.normal(-2, 1, n).astype(np.float32) for n in lengths]
    logprobs = [torch.tensor(one, requires_grad=True) for one in ours]
    loss, figures = loss_of(ALGORITHM, fresh, precomputed(batch, reference=reference, proximal=proximal), logprobs)
    loss.backward()

    wide = [[one.astype(np.float64) for one in arrays] for arrays in (proximal, reference)]
    z = max(0.0, float(np.mean([p.sum() - r.sum() for p, r in zip(*wide, strict=True)][5:])))
    exact = [torch.tensor(one.astype(np.float64), requires_grad=True) for one in ours]
    gained = [one.sum() - r.sum() for one, r in zip(exact, wide[1], strict=False)]
    values = [torch.sigmoid(0.5 * ((r - z) if up else (z - r))) for r, up in zip(gained, ups, strict=True)]
    expected = sum((1.0 if up else 1.5) * (1 - v) for v, up in zip(values, ups, strict=True)) / 5
    expected.backward()
    assert figures["kl"] == pytest.approx(z, rel=1e-5, abs=1e-6)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for one, other in zip(logprobs, exact, strict=True):
        np.testing.assert_allclose(one.grad.numpy(), other.grad.numpy(), rtol=1e-4)


def test_a_rating_does_not_push_a_token_that_it_has_moved_beyond_the_clip():
    """Within a batch: three tokens of the reply that is rated up, three of the other, each moved from −1."""
    batch = rated(sequence([0] * 3), sequence([0] * 3), s0=True, s1=False)
    scores = {"reference": [array(-1, -1, -1)] * 4, "proximal": [array(-1, -1, -1)] * 4}
    moved = [(0.25, 0.1, -2.0), (-0.25, -0.1, 2.0)]  # |log 1.2| is 0.18
    logprobs = [torch.tensor([x - 1 for x in one], requires_grad=True) for one in moved]
    bounded = KTO(KTOConfig(beta=0.5, clip=0.2, taper=False))
    loss, figures = loss_of(bounded, batch, precomputed(batch, **scores), logprobs)
    loss.backward()
    same, _ = loss_of(ALGORITHM, rated(*batch.sequences[:2], s0=True, s1=False), precomputed(batch, **scores), logprobs)
    assert loss.item() == pytest.approx(same.item()), "the value of a reply is that of all of its tokens"
    margin = 0.5 * (0.25 + 0.1 - 2)
    slope = 0.5 * math.exp(-margin) / (1 + math.exp(-margin)) ** 2 / 2
    assert logprobs[0].grad.tolist() == pytest.approx([0, -slope, -slope])
    assert logprobs[1].grad.tolist() == pytest.approx([0, slope, slope])
    assert figures["clip_fraction"] == pytest.approx(1 / 3)


def test_a_down_weighs_as_many_times_less_as_its_reply_has_become_less_likely():
    """Of two tokens each: by the start of the batch e times less likely than when sampled, or e times likelier."""
    batch = rated(*(sequence([0, 0]) for _ in range(4)), s0=True, s1=True, s2=False, s3=False)
    units = ALGORITHM.units(batch)
    behaviour = batch.sequences[0].behaviour
    moved = [array(*(behaviour + one)) for one in (-0.5, 0.5, -0.5, 0.5)]
    seen = precomputed(batch, proximal=[*moved, *moved], processed=[*moved, *moved])
    for taper, expected in ((True, [1, 1, math.exp(-1), 1]), (False, [1, 1, 1, 1])):
        constants, _ = KTO(KTOConfig(taper=taper)).constants(batch, units, seen, {})
        assert [float(one[0]) for one in constants["weights"][:4]] == pytest.approx(expected)
    batch.sequences[2].masked[:] = True
    constants, _ = KTO(KTOConfig()).constants(batch, units, seen, {})
    assert constants["weights"][2][0] == 1, "nobody knows what a mask left to choose from"


def weights(memory: dict[str, float], *ups: bool, **settings: float) -> list[float]:
    algorithm = KTO(KTOConfig(**settings))
    batch = rated(*(sequence([0]) for _ in ups), **{f"s{n}": up for n, up in enumerate(ups)})
    units = algorithm.units(batch)
    constants, _ = algorithm.constants(batch, units, precomputed(batch), memory)
    return [float(one[0]) for one in constants["weights"][: len(ups)]]


def test_the_rarer_rating_weighs_as_much_as_the_others_together_up_to_a_bound():
    assert weights({}, True, True, False) == [1, 1, 2]
    assert weights({}, False, False, False, True) == [1, 1, 1, 3]
    assert weights({}, *[True] * 9, False) == [1] * 9 + [5]
    assert weights({}, True, True, False, largest_weight=1.0) == [1, 1, 1]
    assert weights({}, True, True) == [1, 1]


def test_the_balance_remembers_earlier_ratings_and_forgets_old_ones():
    memory: dict[str, float] = {}
    weights(memory, True, True, True)
    assert memory == {"ups": 3, "downs": 0}
    assert weights(memory, False) == [3]
    old = {"ups": 4.0 * WINDOW, "downs": 4.0 * WINDOW}
    weights(old, True)
    assert old == {"ups": WINDOW / 2 + 1, "downs": WINDOW / 2}
