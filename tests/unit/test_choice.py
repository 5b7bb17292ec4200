"""`algorithm: auto`: which algorithms are chosen for which signals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.config import ALGORITHMS, CHOICES, RewardConfig, TrainerConfig
from shared.ledger.queries import TrainerRow
from shared.reward import Signal
from tests.support.experiences import rows, trainer_config
from trainer_service.choice import choose, chosen_for


@pytest.mark.parametrize(
    ("said", "repeats", "expected"),
    [
        ({"reward"}, False, {"reinforce_pp"}),
        ({"rating"}, False, {"kto"}),
        ({"reward", "rating"}, False, {"reinforce_pp"}),
        ({"metric"}, True, {"grpo"}),
        ({"rating"}, True, {"grpo"}),
        ({"comment"}, False, {"hint"}),
        ({"correction"}, False, {"sft"}),
        ({"demonstration"}, False, {"sft"}),
        ({"preferred_over"}, False, {"dpo"}),
        ({"reward", "comment", "correction"}, False, {"reinforce_pp", "hint", "sft"}),
    ],
)
def test_each_kind_of_signal_has_an_algorithm_that_learns_from_it(said, repeats, expected):
    chosen = choose(said, repeats=repeats)
    assert chosen.keys() == expected
    assert said <= TrainerConfig(algorithms=chosen).learns_from


def test_an_earlier_choice_is_kept_and_missing_algorithms_are_added():
    assert choose({"comment"}, repeats=True, before={"kto": 1.0}) == {"kto": 1.0, "hint": 0.5}
    assert choose({"reward"}, repeats=False, before={"kto": 1.0}) == {"reinforce_pp": 1.0, "kto": 1.0}
    assert choose({"rating"}, repeats=True, before={"reinforce_pp": 1.0}) == {"reinforce_pp": 1.0}


def test_training_on_a_file_keeps_the_choice_of_the_trainer_that_continues_from_it(tmp_path):
    config = trainer_config(tmp_path, tmp_path, algorithm="auto")
    of_file = [replace(row, signals=(Signal("correction", text="so"),)) for row in rows(2)]
    assert chosen_for(config, of_file, None).trainer.algorithms == {"sft": 0.2}
    chosen = {"algorithms": {"reinforce_pp": 1.0}}
    row = TrainerRow("trainer", 3, 3, "s", None, None, None, None, chosen, {}, alive=False, heartbeat_at=0.0)
    assert chosen_for(config, of_file, row).trainer.algorithms == {"reinforce_pp": 1.0, "sft": 0.2}


def test_what_may_be_chosen_is_learnt_from_by_explorers_and_its_sections_are_taken():
    config = TrainerConfig.model_validate({"algorithm": "auto", "hint": {"kl_coef": 0.05}, "rehearse": 0.1})
    assert config.parts == CHOICES and CHOICES.keys() <= ALGORITHMS.keys()
    assert config.learns_from >= {"reward", "rating", "metric", "comment", "correction", "preferred_over"}
    with pytest.raises(ValueError, match=r"trainer\.ppo is set"):
        TrainerConfig.model_validate({"algorithm": "auto", "ppo": {"lam": 0.9}})
    with pytest.raises(ValueError, match="auto"):
        TrainerConfig.model_validate({"algorithms": {"auto": 1.0}})


def test_a_metric_without_a_weight_chooses_nothing(tmp_path):
    config = trainer_config(tmp_path, tmp_path, algorithm="auto")
    config = config.model_copy(update={"reward": RewardConfig(metrics={"quality": 1.0})})
    said = (Signal("rating", text="up"), Signal("metric", value=812.0, name="latency"))
    assert chosen_for(config, [replace(row, signals=said) for row in rows(2)], None).trainer.algorithms == {"kto": 1.0}


def test_two_attempts_at_one_task_among_many_rows_without_one_choose_no_groups(tmp_path):
    config = trainer_config(tmp_path, tmp_path, algorithm="auto")
    of_file = [replace(row, signals=(Signal("reward", value=1.0),)) for row in rows(100)]
    of_file += [replace(of_file[0], msg_id=f"x{run}", task_id="t", run_id=str(run)) for run in range(2)]
    assert chosen_for(config, of_file, None).trainer.algorithms == {"reinforce_pp": 1.0}
