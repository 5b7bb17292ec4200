"""The reward rule, by hand-computed numbers."""

from __future__ import annotations

from typing import get_args

import pytest

from shared.config import ALGORITHMS, RewardConfig, TrainerConfig
from shared.reward import Kind, Signal, learned_kinds, reward_of

UP, DOWN = Signal("rating", text="up"), Signal("rating", text="down")
HALF, COMMENT = Signal("reward", value=0.5), Signal("comment", text="well")
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
    ],
)
def test_the_last_of_each_signal_counts(said, rule, reward):
    assert reward_of(said, RewardConfig.model_validate(rule)) == reward


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_declares_its_signals(name):
    teacher = {"distill": {"path": "teacher"}} if name == "distill" else {}
    learned = learned_kinds(TrainerConfig.model_validate({"algorithm": name, **teacher}))
    assert learned and learned <= set(get_args(Kind))
    assert learned == set(ALGORITHMS[name].learns_from)
