"""The reward rule, by hand-computed numbers."""

from __future__ import annotations

from typing import get_args

import pytest

from shared.config import ALGORITHMS, RewardConfig, TrainerConfig
from shared.reward import Kind, Lesson, NewWords, Signal, credit_of, reward_of

UP, DOWN = Signal("rating", text="up"), Signal("rating", text="down")
HALF, COMMENT = Signal("reward", value=0.5), Signal("comment", text="well")
LARGE, ALSO_LARGE = (Signal("metric", value=1e308, name=name) for name in "ab")
FAST, SLOW = Signal("metric", value=2.0, name="speed"), Signal("metric", value=-1.0, name="speed")


@pytest.mark.parametrize(
    ("said", "rule", "reward"),
    [
        ([], {}, None),
        ([COMMENT], {}, None),
        ([HALF], {}, 0.5),
        ([HALF, Signal("reward", value=0.75)], {}, 0.75),
        ([UP], {}, 1.0),
        ([UP, DOWN], {"down": -1.0}, -1.0),
        ([HALF, UP], {}, 0.5),  # a reward that was said counts instead of a rating
        ([FAST], {}, None),  # a metric that no rule names is only kept
        ([FAST], {"metrics": {"speed": 0.25}}, 0.5),
        ([FAST, SLOW], {"metrics": {"speed": 0.25}}, -0.25),
        ([HALF, FAST], {"metrics": {"speed": 0.25}}, 1.0),
        ([UP, FAST], {"metrics": {"speed": 2.0}, "clip": (-1.0, 3.0)}, 3.0),
        ([Signal("reward", value=-1e308), DOWN], {"clip": (-1.0, 1.0)}, -1.0),
        ([LARGE, ALSO_LARGE], {"metrics": {"a": 10, "b": -10}, "clip": (-1.0, 1.0)}, 0.0),
    ],
)
def test_the_last_of_each_signal_counts(said, rule, reward):
    assert reward_of(said, RewardConfig.model_validate(rule)) == reward


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_declares_its_signals(name):
    teacher = {"distill": {"path": "teacher"}} if name == "distill" else {}
    learned = TrainerConfig.model_validate({"algorithm": name, **teacher}).learns_from
    assert learned and learned <= set(get_args(Kind))
    assert learned == set(ALGORITHMS[name].learns_from)


class Counted(str):
    """A text that counts how often it is compared with another one."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)


def test_what_was_said_five_hundred_times_of_a_row_is_not_compared_each_with_each():
    said = [Signal("comment", text=Counted(number)) for number in range(500)]
    assert credit_of(said, RewardConfig(), frozenset(("comment",))).teaches == Lesson.COMMENT
    assert Counted.compared < 2 * len(said)


def test_words_are_new_once_for_each_key_until_they_have_acted():
    first, again = (Signal("comment", text="well", key_name="a", id=number) for number in (3, 4))
    other, later = Signal("comment", text="well", key_name="b", id=5), Signal("comment", text="so", key_name="a", id=9)
    words = NewWords(Lesson.COMMENT, last_signal=3)
    assert [words.has(one) for one in (HALF, first, again, other, later)] == [False, False, False, True, True]
    words = NewWords(Lesson.REWARD, last_signal=3, log=[first])
    assert [words.has(one) for one in (again, other)] == [False, True]
