"""One update under real DeepSpeed: the same weights whatever the ZeRO stage and however the batch is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.trainer import build_update
from shared.ledger.connect import Ledger
from shared.versions import version_path
from tests.experiences import make_experiences, trainer_config
from tests.models import make_tiny_model
from trainer_service.batch import assemble
from trainer_service.publish import ensure_base_version


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def rows(base):
    return make_experiences(base, 16)


def train(root: Path, base: Path, rows, **trainer) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Two updates; the weights they end with, and the second's figures."""
    config = trainer_config(root, base, **trainer)
    ledger = Ledger.open(config.ledger_url)
    ensure_base_version(config, ledger)
    ledger.close()
    torch.manual_seed(0)
    update, policy = build_update(config, config.root / version_path(0))
    update.update(assemble(rows[:8]), 0, 0)
    stats = update.update(assemble(rows[8:]), 1, -1)
    with update.backend.whole(list(policy.parameters())):
        return {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}, stats


@pytest.fixture(scope="module")
def plain(tmp_path_factory, base, rows):
    return train(tmp_path_factory.mktemp("plain"), base, rows)


def assert_same(got, expected, tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(got[name].float(), tensor.float(), atol=tolerance), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_zero_stage_ends_with_the_same_weights(stage, tmp_path, base, rows, plain):
    weights, stats = train(tmp_path, base, rows, deepspeed={"zero_optimization": {"stage": stage}})
    assert_same(weights, plain[0], 2e-5)
    assert stats["grad_norm"] == pytest.approx(plain[1]["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("budget", [1, 40])
def test_how_a_batch_is_packed_changes_nothing(budget, tmp_path, base, rows, plain):
    weights, stats = train(tmp_path, base, rows, max_tokens_per_micro_batch=budget)
    assert_same(weights, plain[0], 2e-5)
    assert stats["kl_to_reference"] == pytest.approx(plain[1]["kl_to_reference"], abs=1e-5)


def test_a_batch_trained_again_gives_the_same_bits(tmp_path, base, rows, plain):
    weights, _ = train(tmp_path, base, rows)
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain[0].items())


def test_keys_that_deepspeed_refuses_are_named(tmp_path, base, rows):
    from shared.errors import ConfigError

    with pytest.raises(ConfigError, match=r"trainer\.deepspeed"):
        train(tmp_path, base, rows, deepspeed={"zero_optimization": {"stage": 7}})
