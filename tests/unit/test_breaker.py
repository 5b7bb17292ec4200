"""Which figures trip the breaker, and what it says of them."""

from __future__ import annotations

from typing import Any

import pytest

from shared.config import BreakerConfig, TrainerConfig, load_config
from shared.errors import ConfigError
from shared.ledger.queries import Rewards
from shared.stop_request import StopRequest
from tests.support.records import record
from trainer_service.breaker import Breaker, reward_drop
from trainer_service.patience import PatientLedger

HEALTHY = {
    "change_of_update": 0.1, "kl_of_update": 0.02, "kl_to_base": 1.5, "entropy_after": 0.4, "grad_norm_policy": 3.0,
    "grad_norm_critic": 40.0, "logprob_gap_mean": 0.01, "outside_cut": 0.002,
}  # fmt: skip
SPOILED = [
    ("change_of_update", "change_of_update", 0.55),
    ("kl_of_update", "kl_of_update", 25.0),
    ("kl_to_base", "kl_to_base", 51.0),
    ("min_entropy", "entropy_after", 0.0),
    ("max_entropy", "entropy_after", 9.0),
    ("policy_grad_norm", "grad_norm_policy", 2e4),
    ("critic_grad_norm", "grad_norm_critic", 2e6),
    ("logprob_gap", "logprob_gap_mean", 1.1),
    ("outside_cut", "outside_cut", 0.11),
]


def breaker(trainer: dict[str, Any] | None = None, **bounds: float | None) -> Breaker:
    """One that is asked about figures alone: it has no ledger."""
    config, stop = TrainerConfig.model_validate({"breaker": BreakerConfig(**bounds), **(trainer or {})}), StopRequest()
    return Breaker(config, None, PatientLedger(None, stop, 0.1), stop, lambda tripped: None)


def of_versions(*means: float, count: int = 20) -> list[Rewards]:
    """Rewards of 0 or 1, by version."""
    return [Rewards(version, count, mean, mean) for version, mean in enumerate(means)]


def test_a_healthy_update_trips_nothing():
    assert breaker().check(record(**HEALTHY)) is None


@pytest.mark.parametrize(("setting", "figure", "value"), SPOILED)
def test_a_figure_beyond_its_bound_trips_it_and_is_named_with_the_bound_and_a_fix(setting, figure, value):
    trip = breaker().check(record(**{**HEALTHY, figure: value}))
    assert (trip.figure, trip.setting, trip.value) == (figure, f"trainer.breaker.{setting}", value)
    assert figure in trip.reason and f"{trip.setting}={trip.bound:g}" in trip.reason
    assert trip.fix in trip.reason and "flywheel trainer --resume" in trip.reason


RATE = "lower trainer.learning_rate"


@pytest.mark.parametrize(
    ("trainer", "kl_to_base", "min_entropy", "max_entropy"),
    [
        ({"algorithm": "dpo"}, f"{RATE}, or raise trainer.dpo.beta", RATE, RATE),
        ({"algorithm": "kto"}, f"{RATE}, or raise trainer.kto.beta", RATE, RATE),
        ({"algorithm": "sft"}, RATE, RATE, RATE),
        (
            {"algorithm": "ppo"},
            f"{RATE}, or raise trainer.ppo.kl_coef", f"{RATE}, or raise trainer.ppo.entropy_coef", RATE,
        ),
        (
            {"algorithms": {"grpo": 1.0, "dpo": 0.2, "raft": 0.1}, "grpo": {"entropy_coef": 0.01}},
            f"{RATE}, or raise trainer.grpo.kl_coef or trainer.dpo.beta",
            f"{RATE}, or raise trainer.grpo.entropy_coef", f"{RATE}, or lower trainer.grpo.entropy_coef",
        ),
    ],
)  # fmt: skip
def test_the_fix_names_settings_that_the_algorithms_in_use_have(trainer, kl_to_base, min_entropy, max_entropy):
    asked = breaker(trainer)
    spoiled = ({"kl_to_base": 60.0}, {"entropy_after": 1e-9}, {"entropy_after": 9.0})
    fixes = [asked.check(record(**figures)).fix for figures in spoiled]
    assert fixes == [kl_to_base, min_entropy, max_entropy]


@pytest.mark.parametrize(("setting", "figure", "value"), SPOILED)
def test_without_a_bound_no_value_trips_it(setting, figure, value):
    assert breaker(**{setting: None}).check(record(**{**HEALTHY, figure: value})) is None


def test_a_figure_that_was_not_measured_trips_nothing():
    assert breaker().check(record()) is None


def test_the_drop_of_rewards_is_the_distance_of_two_means_in_standard_deviations_over_both():
    bounds = BreakerConfig(reward_versions=2, reward_rows=40)
    # 0.9 and 0.7 before, 0.3 and 0.1 after: means 0.8 and 0.2, over both 0.5 with a standard deviation of 0.5
    assert reward_drop(of_versions(1.0, 0.9, 0.7, 0.3, 0.1), bounds) == pytest.approx(0.6 / 0.5)
    assert reward_drop(of_versions(0.1, 0.3, 0.7, 0.9), bounds) == pytest.approx(-0.6 / 0.5)
    assert reward_drop(of_versions(0.5, 0.5, 0.5, 0.5), bounds) == pytest.approx(0.0)
    assert reward_drop(of_versions(1.0, 1.0, 1.0, 1.0), bounds) == 0.0, "rewards that never differ"


def test_too_few_versions_or_rewards_are_not_compared():
    bounds = BreakerConfig(reward_versions=2, reward_rows=40)
    assert reward_drop(of_versions(1.0, 0.0, 0.0), bounds) is None
    assert reward_drop(of_versions(1.0, 1.0, 0.0, 0.0, count=19), bounds) is None


def test_rewards_that_fall_from_all_to_nothing_trip_it_and_noise_does_not():
    fallen = record(**HEALTHY)
    fallen.rewards = of_versions(*[0.9] * 8, *[0.0] * 8)
    assert breaker().check(fallen).figure == "reward_drop"
    noisy = record(**HEALTHY)
    noisy.rewards = of_versions(*[0.5, 0.7, 0.4, 0.6] * 2, *[0.3, 0.6, 0.4, 0.5] * 2)
    assert breaker().check(noisy) is None
    assert noisy.figures["reward_drop"] == pytest.approx(0.1 / 0.5, rel=0.01)


def test_bounds_that_exclude_every_value_are_refused(tmp_path):
    file = tmp_path / "flywheel.yaml"
    file.write_text("model: {path: m}\ntrainer: {breaker: {min_entropy: 2, max_entropy: 1}}\n")
    with pytest.raises(ConfigError, match="min_entropy=2 is not below max_entropy=1; correct one of them"):
        load_config(file, {})
