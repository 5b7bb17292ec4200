"""Words as a teacher, against numbers computed by hand and an independent oracle in float64."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from shared.config import HintConfig
from tests.support.batches import array, batch_of, loss_of, precomputed, sequence
from trainer_service.algorithms.hint import WINDOW, Hint
from trainer_service.algorithms.seam import Batch, Memory, Needs, Words, one_each
from trainer_service.algorithms.surrogates import policy_constants
from trainer_service.trajectories import Trajectory

BLOCK = np.array([7, 8, 9])


def hint(**settings) -> Hint:
    """By the sampled tokens alone."""
    return Hint(HintConfig(top_k=0, **settings))


def said_of(batch: Batch, place: int, *actions: int, reward: float | None = None) -> Batch:
    """The batch with words about these actions of one of its sequences."""
    batch.words.setdefault(place, []).append(Words(BLOCK, np.array(actions), reward))
    return batch


def constants_of(batch: Batch, *teacher: np.ndarray, reference=None, **settings):
    algorithm = hint(**settings)
    seen = (
        precomputed(batch, teacher=teacher)
        if reference is None
        else precomputed(batch, teacher=teacher, reference=reference)
    )
    return algorithm.constants(batch, algorithm.units(batch), seen, {})


def test_it_needs_a_teacher_and_no_critic():
    assert Hint(HintConfig()).needs == Needs.TEACHER | Needs.PROXIMAL
    assert Hint(HintConfig(kl_coef=0.1)).needs == Needs.TEACHER | Needs.PROXIMAL | Needs.REFERENCE


def test_each_turn_with_words_is_its_own_unit_and_others_are_none():
    batch = said_of(said_of(said_of(batch_of(*[sequence([0, 0, 0])] * 3), 2, 0), 0, 0, 1), 0, 2)
    units = Hint(HintConfig()).units(batch)
    assert [(unit.members, unit.words[0].actions.tolist()) for unit in units] == [
        ((0,), [0, 1]),
        ((0,), [2]),
        ((2,), [0]),
    ]


def test_an_advantage_is_the_bounded_effect_of_the_words_on_the_actions_that_they_are_about():
    batch = said_of(batch_of(sequence([0, 0, 0, 0])), 0, 1, 2, 3)
    constants, figures = constants_of(batch, array(-0.5, -3.5, -0.9), advantage_bound=1.5)
    assert constants["advantages"][0].tolist() == pytest.approx([0.5, -1.5, 0.1])
    assert constants["counts"][0].tolist() == [1, 1, 1]
    assert figures["hint_effect"] == pytest.approx((0.5 + 1.5 + 0.1) / 3)


def test_the_kl_penalty_is_taken_off_the_tokens_that_the_words_are_about():
    batch = said_of(batch_of(sequence([0, 0])), 0, 1)
    constants, _ = constants_of(batch, array(-0.5), reference=[array(-3, -1.4)], kl_coef=0.5)
    assert constants["advantages"][0].tolist() == pytest.approx([0.5 - 0.5 * 0.4])


@pytest.mark.parametrize(
    "settings", [{"importance": "sequence", "importance_cap": 9.0}, {"geometric_mask": (0.5, 1.5)}]
)
def test_weights_are_those_of_the_whole_sequence_however_few_of_its_actions_have_words(settings):
    behaviour = [-1.5, -0.5, -2.5]
    batch = said_of(said_of(batch_of(sequence([0, 0, 0], behaviour)), 0, 0), 0, 2)
    constants, _ = constants_of(batch, array(-0.5), array(-0.5), **settings)
    whole, _ = policy_constants(batch, one_each([0]), precomputed(batch), HintConfig(**settings))
    assert [one.tolist() for one in constants["weights"]] == [[whole["weights"][0][place]] for place in (0, 2)]


@pytest.mark.parametrize(
    ("reward", "change", "counts"),
    [(1.0, 0.5, 1), (1.0, -0.5, 0), (-1.0, -0.5, 1), (-1.0, 0.5, 0), (None, 0.5, 1), (None, -0.5, 1), (0.0, -0.5, 1)],
)
def test_words_that_contradict_the_turns_reward_are_left_out_and_counted(reward, change, counts):
    batch = said_of(batch_of(sequence([0, 0])), 0, 0, 1, reward=reward)
    constants, figures = constants_of(batch, array(-1 + change, -1.1 + change), neutral_reward=0.0)
    assert constants["counts"][0].tolist() == [counts, counts]
    assert bool(constants["advantages"][0].any()) == bool(counts)
    assert figures["hints_contradicting"] == 1 - counts


def test_rewards_from_0_to_1_are_compared_with_neutral_reward_or_not_at_all():
    batch = said_of(batch_of(sequence([0])), 0, 0, reward=0.2)
    assert constants_of(batch, array(-0.5), neutral_reward=0.5)[1]["hints_contradicting"] == 1
    assert constants_of(batch, array(-1.5), neutral_reward=0.5)[1]["hints_contradicting"] == 0
    assert constants_of(batch, array(-0.5), neutral_reward=None)[1]["hints_contradicting"] == 0


def contradicting(reward: float, change: float, others: list[float], memory: Memory | None = None) -> bool:
    """Whether words contradict a turn's reward by default. others: rewards of turns of which no words are said."""
    batch = batch_of(*(sequence([one]) for one in (reward, *others)))
    algorithm, seen = hint(), precomputed(said_of(batch, 0, 0, reward=reward), teacher=[array(-1 + change)])
    figures = algorithm.constants(batch, algorithm.units(batch), seen, {} if memory is None else memory)[1]
    return figures["hints_contradicting"] == 1


@pytest.mark.parametrize("scale", [(0.0, 1.0), (-1.0, 1.0), (-10.0, -5.0)])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_by_default_the_scale_of_rewards_is_that_of_those_seen(scale, share):
    """Blame of a half-right reply is believed, blame of the best and praise of the worst are not, however many are
    good."""
    low, high = scale
    others = [high] * round(10 * share) + [low] * round(10 * (1 - share))
    assert not contradicting((low + high) / 2, -0.5, others) and not contradicting((low + high) / 2, 0.5, others)
    assert contradicting(high, -0.5, others) and not contradicting(high, 0.5, others)
    assert contradicting(low, 0.5, others) and not contradicting(low, -0.5, others)


def test_by_default_rewards_that_are_all_equal_and_single_outliers_leave_words_out_no_more_than_a_mean_does():
    assert not contradicting(0.0, 0.5, [0.0] * 5) and not contradicting(1.0, -0.5, [1.0] * 5)
    for outlier in (-100.0, 100.0):
        others = [outlier, *[0.0, 1.0] * 60]
        assert not contradicting(0.5, -0.5, others) and not contradicting(0.0, -0.5, others)
        assert contradicting(1.0, -0.5, others) and contradicting(0.0, 0.5, others)
    assert not contradicting(0.9, -0.5, [1.0] * 200 + [0.0]), "worse than most, though near to the best"


def test_rewards_that_were_seen_are_remembered_and_are_the_same_after_a_restart():
    kept: Memory = {}
    for draw in range(40):
        contradicting(draw / 7, -0.5, [draw / 3] * 9, kept)
    restarted = json.loads(json.dumps(kept))
    assert restarted == kept and len(kept["rewards"]) == WINDOW
    for memory in (kept, restarted):
        assert contradicting(39 / 3, -0.5, [], memory) and not contradicting(0.0, -0.5, [], memory)
    assert restarted == kept


def test_rewards_that_already_acted_are_still_compared_with_words():
    """Only the words act now: the trajectory has no reward in this batch."""
    memory: Memory = {}
    for reward in (0.0, 1.0, 0.0, 1.0):
        batch = Batch.of([Trajectory(None, [sequence([0])], [0], [None], None)])
        algorithm, seen = hint(), precomputed(said_of(batch, 0, 0, reward=reward), teacher=[array(-1.5)])
        _, figures = algorithm.constants(batch, algorithm.units(batch), seen, memory)
    assert memory["rewards"] == [0.0, 1.0, 0.0, 1.0] and figures["hints_contradicting"] == 1


def test_a_reward_is_seen_once_however_often_its_row_is_rehearsed():
    memory: Memory = {}
    batch = said_of(batch_of(sequence([0.0]), sequence([1.0])), 0, 0, reward=0.0)
    batch = replace(batch, rehearsed={batch.add(sequence([1.0])): None})
    said_of(batch, 2, 0, reward=1.0)
    algorithm, seen = hint(), precomputed(batch, teacher=[array(-1.5), array(-1.5)])
    _, figures = algorithm.constants(batch, algorithm.units(batch), seen, memory)
    assert memory["rewards"] == [0.0, 1.0] and (figures["hints"], figures["hints_contradicting"]) == (2, 1)


def test_words_that_change_nothing_weigh_nothing():
    """The loss is divided by the tokens of the others alone."""
    both = said_of(said_of(batch_of(sequence([0, 0]), sequence([0])), 0, 0, 1), 1, 0)
    one = said_of(batch_of(sequence([0, 0]), sequence([0])), 0, 0, 1)
    logprobs = [torch.tensor([-1.1, -0.8]), torch.tensor([-2.0])]
    teacher = [array(-0.5, -1.5), array(-0.999)]
    with_idle, figures = loss_of(hint(), both, precomputed(both, teacher=teacher), logprobs)
    alone, _ = loss_of(hint(), one, precomputed(one, teacher=teacher[:1]), logprobs)
    assert with_idle.item() == alone.item()
    assert (figures["hints"], figures["hints_without_effect"]) == (2, 1)


def test_a_batch_in_which_no_words_count_has_no_loss():
    batch = said_of(batch_of(sequence([0])), 0, 0)
    algorithm = hint()
    units = algorithm.units(batch)
    constants, figures = algorithm.constants(batch, units, precomputed(batch, teacher=[array(-1)]), {})
    assert algorithm.size(units, constants) == 0
    assert figures["hint_effect"] == 0


def test_loss_and_gradient_equal_numbers_computed_by_hand():
    batch = said_of(batch_of(sequence([0, 0], behaviour=[-1.5, -1.0]), sequence([0])), 0, 0, 1)
    said_of(batch, 1, 0)
    logprobs = [
        torch.tensor([math.log(1.1) - 1, -1.0], requires_grad=True),
        torch.tensor([math.log(0.5) - 1], requires_grad=True),
    ]
    seen = precomputed(batch, teacher=[array(-0.5, -9.0), array(-1.8)])
    algorithm = hint(entropy_coef=0.1)
    loss, figures = loss_of(algorithm, batch, seen, logprobs, entropies=[torch.ones(2), torch.ones(1)])
    loss.backward()
    weight = math.exp(0.5)  # π_prox/π_behaviour of the first token
    # A: 0.5, −2 (bounded), −0.8; the last one's ratio of 0.5 is clipped to 0.8
    assert loss.item() == pytest.approx((-weight * 1.1 * 0.5 + 2.0 + 0.8 * 0.8 - 0.1 * 3) / 3)
    assert logprobs[0].grad.tolist() == pytest.approx([-weight * 1.1 * 0.5 / 3, 2.0 / 3])
    assert logprobs[1].grad.tolist() == [0]
    assert figures["clip_fraction"] == pytest.approx(1 / 3)


def test_loss_and_gradient_equal_an_oracle_in_float64_for_turns_of_one_sequence_with_words_each():
    draw = np.random.default_rng(3)
    lengths, spoken = (7, 4, 5), {0: [(0, 3), (3, 7)], 2: [(2, 5)]}
    batch = batch_of(*(sequence([0.0] * n, behaviour=(-1 - draw.random(n)).tolist()) for n in lengths))
    teacher = []
    for place, spans in spoken.items():
        for begin, end in spans:
            said_of(batch, place, *range(begin, end))
            teacher.append((-1 + draw.normal(0, 2, end - begin)).astype(np.float32))
    values = [-1 + 0.2 * draw.normal(0, 1, n) for n in lengths]
    logprobs = [torch.tensor(value, requires_grad=True) for value in values]
    loss, _ = loss_of(hint(advantage_bound=1.0), batch, precomputed(batch, teacher=teacher), logprobs)
    loss.backward()

    gradients, total, count, number = [np.zeros(n) for n in lengths], 0.0, 0, 0
    for place, spans in spoken.items():
        for begin, end in spans:
            for t in range(begin, end):
                advantage = min(max(float(teacher[number][t - begin]) + 1, -1), 1)
                weight = min(math.exp(-1 - float(batch.sequences[place].behaviour[t])), 2)
                ratio = math.exp(values[place][t] + 1)
                bounded = min(max(ratio, 0.8), 1.2)
                best = min(ratio * advantage, bounded * advantage)
                total, count = total - weight * best, count + 1
                if best == ratio * advantage:
                    gradients[place][t] -= weight * ratio * advantage
            number += 1
    assert loss.item() == pytest.approx(total / count, rel=1e-6)
    for place in spoken:
        np.testing.assert_allclose(logprobs[place].grad.numpy(), gradients[place] / count, rtol=1e-5, atol=1e-7)
    assert logprobs[1].grad is None, "of it nothing was said"
