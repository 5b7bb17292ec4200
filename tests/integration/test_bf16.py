"""What a GPU computes in by default, under real DeepSpeed on a CPU: bfloat16 weights, float32 masters and gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.integration.test_update import build
from tests.support.batches import rows_batch
from tests.support.experiences import make_experiences
from tests.support.forms import FULL
from tests.support.models import make_tiny_model
from trainer_service.update import Updater

ONCE = {"epochs": 1, "minibatches": 1, "precision": "bf16"}
UNGUARDED = {"return_clip": 1e6, "outlier_bound": None, "normalize_returns": False}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def rows(base):
    return make_experiences(base, 8)


@pytest.mark.parametrize("stage", [0, 2, 3] if FULL else [0, 3])
def test_gradients_are_clipped_under_each_zero_stage(stage, tmp_path, base, rows):
    """Adam with a huge ε and as large a rate moves the weights by the clipped gradient itself."""
    deepspeed = {"optimizer": {"params": {"betas": [0.0, 0.0], "eps": 1e6}}, "zero_optimization": {"stage": stage}}
    update, policy = build(tmp_path, base, learning_rate=1e6, deepspeed=deepspeed, ppo=UNGUARDED, **ONCE)
    before = masters(update, policy)
    stats = update.update(rows_batch([replace(rows[0], reward=1e6), *rows[1:]]), step=0, version=0)
    assert stats["grad_norm_policy"] > 2
    assert float((masters(update, policy) - before).norm()) == pytest.approx(1.0, rel=1e-2)


def masters(update: Updater, policy) -> torch.Tensor:
    return torch.cat([update.backend.whole(parameter).flatten().clone() for parameter in policy.parameters()])


def test_a_gradient_is_held_once(tmp_path, base, rows, monkeypatch):
    """After the last backward pass none in bfloat16 is left: docs/trainer.md counts 4 bytes for each."""
    update, policy = build(tmp_path, base, **ONCE)
    left = []
    monkeypatch.setattr(update.backend, "_set_rates", lambda _: left.extend(p.grad for p in policy.parameters()))
    update.update(rows_batch(rows), step=0, version=0)
    assert left and all(gradient is None for gradient in left)
