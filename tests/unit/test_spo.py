"""SPO and its tracker: numbers computed by hand, an oracle from the formula, and memory that survives JSON."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from shared.config import SPOConfig
from tests.support.batches import precomputed, rows_batch
from tests.unit.test_groups import row
from trainer_service.algorithms.attempts import Attempt, attempts, tracked
from trainer_service.algorithms.spo import SPO


def settings(**given) -> SPOConfig:
    free = {"kl_coef": 0, "outlier_bound": None, "half_life_kl": None, "half_life_updates": None, "shrinkage": 1}
    return SPOConfig.model_validate({**free, **given})


def one(score: float, *levels: str) -> Attempt:
    return Attempt("group", ("", *levels), score, [(0, 0, 1)])


def test_a_task_is_shrunk_towards_its_system_prompt_and_that_towards_all():
    memory, config = {}, settings(bounds=(0, 1))
    assert tracked([one(1.0, "p", "t")], memory, 0.0, config) == [0.5], "nothing is known"
    # all: (1 + ½)/2 = ¾; the prompt: (1 + ¾)/2 = ⅞; the task: (1 + ⅞)/2
    assert tracked([one(0.0, "p", "t")], memory, 0.0, config) == [pytest.approx(15 / 16)]
    # each level has now n = 2 and m = ½
    assert tracked([one(0.0, "p", "other")], memory, 0.0, config) == [pytest.approx(0.5)]
    assert memory["seen"]["t"] == [2.0, 0.5, 0.0]


def test_bounded_rewards_make_the_counts_of_a_beta_distribution():
    """α = β = ½ before, as shrinkage 1 has it: v = (α + Σ r) / (α + β + n), of rewards brought to [0, 1]."""
    memory, config = {}, settings(bounds=(-1, 1))
    rewards = [1, -1, 1, 1, 0, 7]  # what is out of bounds counts as the bound
    for reward in rewards:
        (value,) = tracked([Attempt("g", ("",), reward, [(0, 0, 1)])], memory, 0.0, config)
    known = [(min(max(r, -1), 1) + 1) / 2 for r in rewards[:-1]]
    alpha, beta = 0.5 + sum(known), 0.5 + sum(1 - r for r in known)
    assert value == pytest.approx(2 * alpha / (alpha + beta) - 1)


def test_without_bounds_the_first_batch_is_compared_with_its_own_mean():
    memory, config = {}, settings()
    assert tracked([one(10.0, "p"), one(20.0, "q")], memory, 0.0, config) == [15, 15]
    # all: (2·15 + 40)/3; the prompt: half its own 10
    assert tracked([one(40.0, "p")], memory, 0.0, config) == [pytest.approx((10 + 70 / 3) / 2)]


def test_what_was_seen_counts_half_after_a_half_life_of_updates_or_of_divergence():
    for forget, drift in (({"half_life_updates": 1}, 0.0), ({"half_life_kl": 0.06}, 0.06)):
        memory, config = {}, settings(bounds=(0, 1), **forget)
        tracked([one(1.0)], memory, drift, config)
        # n = ½: (½·1 + ½)/(½ + 1)
        assert tracked([one(0.0)], memory, drift, config) == [pytest.approx(2 / 3)]
        count, mean, _ = memory["seen"][""]
        assert (count, mean) == pytest.approx((1.5, 1 - 1 / 1.5))


def test_half_lives_of_divergence_and_of_updates_add_up():
    memory = {}
    tracked([one(1.0)], memory, 0.03, settings(half_life_kl=0.06, half_life_updates=4))
    assert memory["clock"] == pytest.approx(0.5 + 0.25)


def test_the_values_of_many_batches_equal_an_oracle_that_keeps_every_reward():
    """v from all rewards ever seen, each with the weight that its age leaves it."""
    draw, memory, config = np.random.default_rng(0), {}, settings(half_life_updates=7, shrinkage=3, bounds=(-2, 2))
    past: list[tuple[int, tuple[str, ...], float]] = []
    for step in range(1, 30):
        found = [
            one(float(draw.uniform(-2, 2)), f"p{draw.integers(3)}", f"t{draw.integers(8)}")
            for _ in range(int(draw.integers(1, 6)))
        ]
        values = tracked(found, memory, 0.0, config)
        for attempt, value in zip(found, values, strict=True):
            expected = 0.0  # the middle of the bounds
            for key in attempt.levels:
                mine = [(0.5 ** ((step - when) / 7), score) for when, keys, score in past if key in keys]
                total = math.fsum(weight for weight, _ in mine)
                expected = (math.fsum(w * s for w, s in mine) + 3 * expected) / (total + 3)
            assert value == pytest.approx(expected, rel=1e-9, abs=1e-12)
        past += [(step, attempt.levels, attempt.score) for attempt in found]


def test_memory_survives_json_bit_for_bit_and_continues_unchanged():
    draw = np.random.default_rng(5)
    config = settings(half_life_kl=0.06, half_life_updates=9, shrinkage=2.5)
    batches = [[one(float(draw.normal()), f"p{n % 2}", f"t{draw.integers(4)}") for n in range(5)] for _ in range(20)]
    kept, saved = {}, {}
    for batch in batches:
        drift = float(draw.exponential(0.01))
        saved = json.loads(json.dumps(saved, allow_nan=False))
        assert tracked(batch, saved, drift, config) == tracked(batch, kept, drift, config)
    assert json.dumps(saved) == json.dumps(kept)


def test_memory_is_bounded_and_evicts_the_least_recently_seen():
    memory, config = {}, settings(max_keys=4)
    for number in range(50):
        tracked([one(1.0, "p", f"t{number}")], memory, 0.0, config)
    assert list(memory["seen"]) == ["t48", "t49", "p", ""]
    assert memory["seen"][""][0] == 50, "what is known of all is never forgotten"


def levels_of(*rows, prompt_tokens: int) -> list[tuple[str, ...]]:
    batch, config = rows_batch(rows), settings()
    units = SPO(config).units(batch)
    return [one.levels for one in attempts(batch, units, precomputed(batch), config, {}, prompt_tokens=prompt_tokens)]


def test_a_system_prompt_is_known_by_its_first_tokens_and_a_task_by_its_name_and_group():
    first, same, other, short = levels_of(
        row(1, "a", "1", 1.0, prompt=(7, 8, 9, 1)),
        row(2, "b", "1", 1.0, prompt=(7, 8, 9, 2)),
        row(3, "a", "2", 1.0, prompt=(7, 8, 5, 1), key_group="x"),
        row(4, None, None, 1.0, prompt=(7,)),
        prompt_tokens=3,
    )
    assert first[:2] == same[:2]
    assert first[1] != other[1]
    assert len({first[2], same[2], other[2]}) == 3, "tasks of two groups of keys are two"
    assert len(short) == 2, "without a task there are two levels"
    assert all(len(key) == 16 for key in (*first[1:], *short[1:]))


def test_advantages_are_the_excess_over_the_expected_reward_divided_by_the_deviation():
    algorithm, memory = SPO(settings(bounds=(0, 1), baseline_sequences=2)), {}
    batch = rows_batch([row(1, "easy", "1", 1.0), row(2, "hard", "1", 0.0)])
    algorithm.constants(batch, algorithm.units(batch), precomputed(batch), memory)
    batch = rows_batch([row(1, "easy", "2", 1.0), row(2, "hard", "2", 0.5)])
    constants, figures = algorithm.constants(batch, algorithm.units(batch), precomputed(batch), memory)
    # all ½ and the prompt ½: easy (1 + ½)/2 and hard ½/2; a success at the hard one is the greater surprise
    gains = np.array([1 - 0.75, 0.5 - 0.25])
    assert figures["baseline"] == 0.5
    assert constants["advantages"][0].tolist() == [0, 0], "both are equally better: the batch has no deviation"
    assert gains.std() == 0
    batch = rows_batch([row(1, "easy", "3", 1.0), row(2, "hard", "3", 1.0)])
    constants, _ = algorithm.constants(batch, algorithm.units(batch), precomputed(batch), memory)
    assert [float(one[0]) for one in constants["advantages"]] == pytest.approx([-1, 1])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bounds": (1, 0)}, r"trainer\.spo\.bounds=\[1\.0, 0\.0\]: the lower bound comes first; swap them"),
        ({"bounds": (0, 1), "normalize_rewards": True}, r"trainer\.spo\.bounds and .*normalize_rewards are both set"),
    ],
)
def test_bounds_that_cannot_be_meant_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        settings(**given).check("trainer.spo")
