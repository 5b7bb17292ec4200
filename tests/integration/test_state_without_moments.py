"""A saved state of an optimizer that keeps nothing for a weight."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from services.trainer import build_update
from shared.errors import ConfigError
from tests.support.experiences import make_experiences, trainer_config
from tests.support.models import publish_base
from trainer_service.learner import Learner
from trainer_service.ranks import join_ranks
from trainer_service.resume import SavedState, StateStore

PLAIN = {"type": "SGD", "params": {"lr": 0.1}}


@contextlib.contextmanager
def learner_of(root: Path, model: Path, optimizer: dict[str, object]):
    deepspeed = {"zero_optimization": {"stage": 0}, "optimizer": optimizer}
    config = trainer_config(root, model, deepspeed=deepspeed)
    base, ranks = publish_base(config), join_ranks(60)
    with contextlib.closing(StateStore(config.root, "trainer")) as states:
        yield Learner(lambda: build_update(config, base, ranks), ranks, states)


def saved(root: Path, model: Path, *, steps: int) -> SavedState:
    with learner_of(root, model, PLAIN) as learner:
        for number in range(steps):
            learner.train(make_experiences(model, 8), step=number, version=number, ahead=0)
        return learner.save(1)


def test_a_state_without_moments_is_refused_by_an_optimizer_that_keeps_some(tmp_path, model):
    state = saved(tmp_path, model, steps=1)
    with learner_of(tmp_path, model, {"type": "AdamW"}) as learner, pytest.raises(ConfigError) as refused:
        learner.load(state)
    assert "has nothing for each weight, and trainer.deepspeed.optimizer keeps exp_avg, exp_avg_sq;" in str(
        refused.value
    )
    with learner_of(tmp_path, model, PLAIN) as learner:
        learner.load(state)
        assert learner.backend.state.progress()["steps"] > 0


def test_a_state_before_the_first_step_goes_on_with_any_optimizer(tmp_path, model):
    state = saved(tmp_path, model, steps=0)
    with learner_of(tmp_path, model, {"type": "AdamW"}) as learner:
        learner.load(state)
        assert learner.backend.state.progress()["steps"] == 0
