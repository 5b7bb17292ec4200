"""Importance weights, their masks, and what is plotted of them: numbers computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from shared.config import ReinforcePPConfig
from tests.support.batches import array, batch_of, precomputed, sequence
from trainer_service.algorithms.seam import one_each
from trainer_service.algorithms.surrogates import drift_of, importance_weights, policy_constants

RATIOS = np.log(array(0.25, 1.0, 1.5, 8.0))  # their product is 3, its fourth root 1.316


def weights(log_ratios=RATIOS, **settings) -> list[float]:
    return importance_weights(log_ratios, ReinforcePPConfig(**settings)).tolist()


def test_weights_of_tokens_are_truncated_on_both_sides():
    assert weights() == pytest.approx([0.25, 1, 1.5, 2])
    assert weights(importance_floor=0.5, importance_cap=1.2) == pytest.approx([0.5, 1, 1.2, 1.2])


def test_icepop_leaves_out_tokens_on_both_sides():
    assert weights(importance_outside="mask", importance_floor=0.5, importance_cap=5) == pytest.approx([0, 1, 1.5, 0])


def test_the_weight_of_a_sequence_is_the_product_of_its_tokens():
    assert weights(importance="sequence", importance_cap=5) == pytest.approx([3] * 4)
    assert weights(importance="sequence") == pytest.approx([2] * 4)
    assert weights(importance="sequence", importance_outside="mask") == [0] * 4


def test_a_geometric_mask_leaves_out_whole_sequences():
    assert weights(geometric_mask=(0.8, 1.4)) == pytest.approx([0.25, 1, 1.5, 2])
    assert weights(geometric_mask=(0.8, 1.3)) == [0] * 4
    assert weights(geometric_mask=(1.4, 2.0)) == [0] * 4


def test_topr_has_weights_of_its_own_and_keeps_the_masks():
    assert weights(surrogate="topr") == [1] * 4
    assert weights(surrogate="topr", importance_outside="mask") == [1, 1, 1, 0]


def test_a_weight_is_zero_where_the_policy_could_not_have_sampled_and_the_cap_beyond_all_numbers():
    assert weights(array(-math.inf, 1e6)) == [0, 2]
    assert weights(array(-math.inf, 0.0), importance="sequence") == [0, 0]
    assert weights(array(-math.inf, 0.0), geometric_mask=(0.5, 2.0)) == [0, 0]


def test_the_figures_measure_the_drift_of_the_samplers():
    batch = batch_of(sequence([0.0, 0.0], behaviour=[-1.0, -1.0]), sequence([0.0], behaviour=[-1.0]))
    seen = precomputed(batch, processed=[array(-1.0, -1.0 + math.log(3)), array(-1.0 + math.log(0.5))])
    config = ReinforcePPConfig(kl_coef=0, importance_outside="mask")
    _, figures = policy_constants(batch, one_each([0, 1]), seen, config)
    assert figures == pytest.approx(
        {
            "importance_weight": (1 + 0 + 0.5) / 3,
            "masked_fraction": 1 / 3,
            "effective_sample_size": 4.5**2 / (3 * (1 + 9 + 0.25)),
            "kl_to_sampler": ((2 - math.log(3)) + (-0.5 - math.log(0.5))) / 3,
        },
        rel=1e-5,
    )


def test_a_batch_of_the_policys_own_samples_is_worth_all_of_its_tokens():
    batch = batch_of(sequence([0.0] * 5))
    _, figures = policy_constants(batch, one_each([0]), precomputed(batch), ReinforcePPConfig(kl_coef=0))
    assert figures["effective_sample_size"] == 1
    assert figures["kl_to_sampler"] == 0


def test_a_token_that_the_policy_s_cut_leaves_out_has_the_ratio_before_the_cut():
    batch = batch_of(sequence([0.0, 0.0, 0.0], behaviour=[-1.0, -1.0, -1.0]))
    seen = replace(
        precomputed(batch, processed=[array(-1.0 + math.log(2), -math.inf, -math.inf)]),
        proximal=[array(-1.5, -1.1, -9.0)],
    )
    (drift,) = drift_of(batch, one_each([0]), seen)
    assert drift == pytest.approx([math.log(2), -0.1, -8.0], abs=1e-6)


def test_what_a_grammar_forced_has_the_weight_one():
    batch = batch_of(sequence([0.0, 0.0], behaviour=[-9.0, -1.0]))
    batch.sequences[0].masked[0] = True
    constants, _ = policy_constants(batch, one_each([0]), precomputed(batch), ReinforcePPConfig(kl_coef=0))
    assert constants["weights"][0].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"importance_floor": 2.0}, r"trainer\.ppo\.importance_floor=2 is not below trainer\.ppo\.importance_cap=2"),
        ({"geometric_mask": (2.0, 0.5)}, r"trainer\.ppo\.geometric_mask=\[2\.0, 0\.5\]: the lower bound comes first"),
    ],
)
def test_bounds_in_the_wrong_order_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        ReinforcePPConfig(**settings).check("trainer.ppo")
