"""A key's share of the gradient: numbers computed by hand, and the property that they are to have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shared.reward import Signal, reward_key
from tests.support.batches import array, rows_batch
from tests.unit.test_groups import row
from trainer_service.shares import bound_shares, largest_mass


def of_members(*keys: str | None) -> dict[int, str | None]:
    return dict(enumerate(keys))


def test_a_key_that_hates_everything_is_held_to_its_share():
    constants = {
        "weights": [array(1, 1), array(2), array(1), array(0.5)],
        "advantages": [array(-3, -3), array(-2), array(1), array(2)],
    }
    bounded, figures = bound_shares(constants, of_members("angry", "angry", "calm", None), 0.5)
    # angry has 6 + 4, the others 1 each: it keeps 2, half of 4
    assert [one.tolist() for one in bounded["weights"]] == [
        pytest.approx([0.2, 0.2]),
        pytest.approx([0.4]),
        [1],
        [0.5],
    ]
    assert figures == {"largest_key_share": pytest.approx(10 / 12)}
    assert constants["weights"][0].tolist() == [1, 1], "its argument is not changed"


def test_shares_in_a_mean_over_sequences_count():
    constants = {
        "weights": [array(1, 1), array(1)],
        "advantages": [array(1, 1), array(1)],
        "shares": [array(0.5, 0.5), array(1)],
    }
    bounded, figures = bound_shares(constants, of_members("a", "b"), 0.5)
    assert figures["largest_key_share"] == 0.5
    assert [one.tolist() for one in bounded["weights"]] == [[1, 1], [1]]


def test_what_words_change_counts_where_a_divergence_is_learnt():
    constants = {
        "weights": [array(1, 1), array(1)],
        "advantages": [array(0, 0), array(0)],
        "divergence_weights": [array(1, 1), array(1)],
        "effects": [array(-2, 1), array(1)],
    }
    bounded, figures = bound_shares(constants, of_members("loud", "calm"), 0.5)
    assert figures == {"largest_key_share": pytest.approx(3 / 4)}
    assert [one.tolist() for one in bounded["divergence_weights"]] == [pytest.approx([1 / 3, 1 / 3]), [1]]


def test_a_weight_of_a_whole_sequence_is_lowered_alike():
    constants = {"weights": [array(3), array(1)], "advantages": [array(1, 1), array(2)]}
    bounded, _ = bound_shares(constants, of_members("a", "b"), 0.5)
    assert [one.tolist() for one in bounded["weights"]] == [[pytest.approx(1)], [1]]


@pytest.mark.parametrize("constants", [{"advantages": [array(1)]}, {"weights": [array(0)]}, {}])
def test_what_has_no_weights_or_no_gradient_is_left_alone(constants):
    assert bound_shares(constants, of_members("a"), 0.3) == (constants, {})


def test_with_a_share_of_one_nothing_is_looked_at():
    constants = {"weights": [array(5)]}
    assert bound_shares(constants, of_members("a"), 1.0) == (constants, {})


def test_no_key_exceeds_its_share_of_the_rest_and_none_is_bounded_needlessly():
    draw = np.random.default_rng(0)
    for _ in range(300):
        masses = draw.exponential(size=int(draw.integers(1, 12))) ** 4
        share = float(draw.uniform(0.05, 1))
        bound = largest_mass(masses.tolist(), share)
        left = np.minimum(masses, bound)
        allowed = max(share, 1 / len(masses))
        assert left.max() <= allowed * left.sum() * (1 + 1e-9)
        if bound < masses.max():
            assert left.max() == pytest.approx(allowed * left.sum()), "the largest such bound"


def test_a_slope_counts_for_each_token_of_a_loss_of_whole_sequences():
    constants = {"weights": [array(1), array(2), array(1)], "slopes": [array(0.5, 0.5, 0.5), array(0.25), array(1, 1)]}
    bounded, figures = bound_shares(constants, of_members("loud", "loud", "calm"), 0.4)
    assert figures == {"largest_key_share": pytest.approx(2 / 4)}
    assert [one.tolist() for one in bounded["weights"]] == [[1], [2], [1]], "of two keys each may have a half"
    bounded, _ = bound_shares(constants, of_members("calm", "calm", "loud"), 0.4)
    assert [one.tolist() for one in bounded["weights"]] == [[1], [2], [1]]
    constants["slopes"][2] = array(2, 2)
    bounded, _ = bound_shares(constants, of_members("calm", "calm", "loud"), 0.4)
    assert [one.tolist() for one in bounded["weights"]] == [[1], [2], [0.5]]
    assert bounded["slopes"] is constants["slopes"]


def test_members_without_a_key_are_neither_counted_nor_bounded():
    constants = {"weights": [array(9), array(3), array(1)], "advantages": [array(1)] * 3}
    bounded, figures = bound_shares(constants, {1: "a", 2: "b"}, 0.5)
    assert [one.tolist() for one in bounded["weights"]] == [[9], [pytest.approx(1)], [1]]
    assert figures == {"largest_key_share": pytest.approx(3 / 4)}


def test_a_trajectory_belongs_to_the_key_that_set_the_reward_of_its_newest_turn_with_one():
    """Words set no reward, so a comment makes no trajectory its key's."""
    said = (Signal("reward", value=1.0, key_name="a"), Signal("comment", text="good", key_name="c"))
    rows = [
        replace(row(1, "t", "1", 1.0), signals=said),
        replace(row(2, "t", "1", 0.0), signals=(Signal("rating", text="down", key_name="b"),)),
        replace(row(3, "t", "1", None), signals=said[1:]),
        replace(row(4, None, None, None), signals=said[1:]),
        row(5, None, None, 1.0),
    ]
    batch = rows_batch(rows)
    assert batch.scored_by == {0: "b", 1: "b", 2: None, 3: None, 4: None}


def test_a_metric_that_sets_no_reward_makes_no_trajectory_its_key_s():
    """A metric without a weight, about a turn after those that the outcome was sent for."""
    said = Signal("reward", value=1.0, scope="run", key_name="a")
    rows = [
        replace(row(1, "t", "1", 1.0), outcome=1.0, signals=(said,)),
        replace(row(2, "t", "1", None), signals=(Signal("metric", value=9.0, name="latency", key_name="b"),)),
    ]
    assert set(rows_batch(rows).scored_by.values()) == {"a"}


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ([("reward", "a"), ("rating", "b"), ("metric", "c")], "a"),
        ([("metric", "c"), ("rating", "a"), ("rating", "b"), ("metric", "c")], "b"),
        ([("metric", "a"), ("metric", "c"), ("comment", "d")], "c"),
        ([("comment", "d")], None),
        ([("reward", "a"), ("reward", None)], None),
    ],
)
def test_a_reward_belongs_to_the_key_that_sent_its_signal(said, key):
    assert reward_key([Signal(kind, key_name=name) for kind, name in said]) == key
