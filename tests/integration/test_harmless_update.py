"""Before rows are blamed an update that no row can spoil is tried, whatever the algorithms learn from."""

from __future__ import annotations

from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from services.trainer import build_update
from shared.errors import StartupError
from tests.support.experiences import trainer_config
from tests.support.forms import FULL
from tests.support.models import make_tiny_model, publish_base
from trainer_service.learner import Learner
from trainer_service.models import named_weights
from trainer_service.ranks import join_ranks

ALGORITHMS = ("ppo", "grpo", "raft", "sft", "dpo", "kto", "hint")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "base")


@contextmanager
def learner(root: Path, base: Path, **trainer):
    config, ranks = trainer_config(root, base, **trainer), join_ranks(60)
    version_0 = publish_base(config)
    torch.manual_seed(0)
    with closing(Learner(lambda: build_update(config, version_0, ranks), ranks)) as made:
        yield made


def weights_of(made: Learner) -> dict[str, torch.Tensor]:
    return {name: made.backend.whole(tensor).clone() for name, tensor in named_weights(made.policy).items()}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_steps_every_model_whatever_the_algorithm_learns_from(tmp_path, base, algorithm):
    with learner(tmp_path, base, algorithm=algorithm) as made:
        before = weights_of(made)
        made.try_harmless_update()
        assert any(not torch.equal(before[name], tensor) for name, tensor in weights_of(made).items())


@pytest.mark.parametrize("algorithm", ALGORITHMS if FULL else ("ppo", "dpo"))  # with a critic, and without
def test_with_settings_that_no_update_survives_the_trainer_ends_and_no_row_is_blamed(tmp_path, base, algorithm):
    with (
        learner(tmp_path, base, algorithm=algorithm, learning_rate=1e38) as made,
        pytest.raises(StartupError, match="learning_rate"),
    ):
        made.require_harmless_update("it failed")
