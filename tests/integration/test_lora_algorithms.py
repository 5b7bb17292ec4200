"""Every algorithm with adapters: its gradient is that of all weights, seen through the adapter.

At its first step B is 0, so that W + s B A is W. Then the gradient of B is s G Aᵀ and that of A is 0, where G is the
gradient of W when all weights are trained and s is alpha / rank.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer import build_update
from shared.experience import Experience, Other
from shared.reward import Signal
from tests.support.experiences import make_experiences, trainer_config
from tests.support.forms import FULL
from tests.support.models import publish_base
from trainer_service.algorithms.registry import PAGES
from trainer_service.learner import Learner
from trainer_service.ranks import join_ranks

ROOT = Path(__file__).parents[2]
LORA = {"rank": 4, "alpha": 6}
SCALE = 1.5
ONE_STEP = {"epochs": 1, "minibatches": 1, "max_grad_norm": 1e9}
SOME = ("ppo", "raft", "dpo", "kto", "hint", "distill")  # each kind of loss once
SETTINGS: dict[str, dict[str, Any]] = {
    "raft": {"above": 0.5},
    "hint": {"neutral_reward": None, "least_effect": 0.0},
    "distill": {"url": "http://127.0.0.1:9"},
}


@pytest.fixture(scope="module")
def rows(model) -> list[Experience]:
    """Two answer each prompt, and all that can be said was said of them."""
    made = make_experiences(model, 8)
    pairs = [
        (one, replace(other, tokens=replace(other.tokens, prompt_ids=one.tokens.prompt_ids)))
        for one, other in zip(made[::2], made[1::2], strict=True)
    ]
    said = [
        (say_of(worse, number, "down"), say_of(better, number, "up", over=worse))
        for number, (worse, better) in enumerate(pairs)
    ]
    return [row for pair in said for row in pair]


def say_of(row: Experience, task: int, rating: str, over: Experience | None = None) -> Experience:
    return replace(
        row,
        task_id=f"t{task}",
        run_id=row.msg_id,
        signals=(Signal("rating", text=rating),),
        preferred_over=() if over is None else (Other(over.msg_id, over.tokens, over.sampling),),
        correction=np.array([9, 10 + task, 2], np.int32),
        hint=np.array([1, 6, 20 + row.id, 2], np.int32),
        teacher=row.tokens.logprobs - np.linspace(0, 0.5, len(row.tokens.logprobs), dtype=np.float32),
    )


def first_gradient(root: Path, model: Path, rows: list[Experience], name: str, lora: dict[str, Any] | None) -> Any:
    """Of the policy's trained weights, by name, and the weights after it: Adam's first moment is (1 − β) of it."""
    config = trainer_config(root, model, lora, algorithm=name, **{name: SETTINGS.get(name, {})}, **ONE_STEP)
    base, ranks = publish_base(config), join_ranks(60)
    learner = Learner(lambda: build_update(config, base, ranks), ranks)
    before = {key: learner.backend.whole(p).clone() for key, p in learner.backend.trained_parameters().items()}
    learner.train(rows, step=0, version=0)
    state, trained = learner.backend.state, learner.backend.trained_parameters()
    gradients = {key: state.read(p, "exp_avg").clone() for key, p in trained.items()}
    learner.close()
    return before, gradients


@pytest.mark.parametrize("name", PAGES if FULL else SOME)
def test_the_first_gradient_of_an_adapter_is_that_of_the_weights_that_it_adapts(name, tmp_path, model, rows):
    _, whole = first_gradient(tmp_path / "full", model, rows, name, None)
    before, adapted = first_gradient(tmp_path / "lora", model, rows, name, LORA)
    ends = ".lora_B.policy.weight"
    modules = [key.removesuffix(ends) for key in adapted if key.endswith(ends)]
    assert len(modules) == 14
    for module in modules:
        a_RI = before[f"{module}.lora_A.policy.weight"]
        expected = SCALE * whole[f"{module}.weight"] @ a_RI.T
        assert expected.abs().max() > 0, module
        found = adapted[module + ends]
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())), module
        assert not adapted[f"{module}.lora_A.policy.weight"].any()


def test_every_page_says_whether_it_runs_with_adapters():
    for name in PAGES:
        page = (ROOT / f"docs/algorithms/{name}.md").read_text()
        assert page.count("**With adapters.** Runs with `model.kind: lora`") == 1, name
