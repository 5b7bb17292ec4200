"""What is said of rows teaches two ranks what it teaches one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shared.config import RewardConfig, load_config
from shared.experience import Experience
from shared.ledger import transitions
from shared.ledger.queries import find_trainer
from shared.reward import Signal
from shared.versions import version_path
from tests.integration.test_ranks import ADAM, EVERYTHING_PARTITIONED
from tests.support.experiences import make_experiences
from tests.support.forms import FULL
from tests.support.lives import Lives
from tests.support.models import make_tiny_model
from tests.support.processes import wait_for
from tests.support.samples import sample
from tests.support.trained_roots import BATCH, begin, newest, open_ledger, prepare

REWARDED = ("reinforce_pp", "spo", "grpo", "rloo", "step_grpo")
MIXES: dict[str, dict[str, Any]] = {
    "rewards": {"algorithms": dict.fromkeys(REWARDED, 1.0)},
    "preferences": {"algorithms": {"dpo": 1.0, "kto": 1.0, "sft": 0.5}},
    "teachers": {"algorithms": {"raft": 1.0, "hint": 1.0, "distill": 1.0}, "raft": {"quantile": 0.5}},
}


@pytest.fixture(scope="module")
def rows(model: Path) -> list[Experience]:
    """Each two answer one prompt."""
    made = make_experiences(model, BATCH)
    prompts = [made[number - number % 2].tokens.prompt_ids for number in range(BATCH)]
    return [replace(row, tokens=replace(row.tokens, prompt_ids=ids)) for row, ids in zip(made, prompts, strict=True)]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("teacher") / "model", seed=1)


def train(
    lives: Lives, root: Path, model: Path, rows: list[Experience], **trainer: Any
) -> tuple[dict[str, Any], dict[str, float]]:
    """One update, of two tasks where an algorithm asks for them. Returns the weights and the figures."""
    prepare(root, model, **trainer)
    config, ledger = load_config(root / "flywheel.yaml"), open_ledger(root)
    learned = config.trainer.learns_from
    with ledger.write() as connection:
        tasks = [{"task_id": f"t{number // 4}", "run_id": str(number)} for number in range(len(rows))]
        named = tasks if "grpo" in config.trainer.parts else [{}] * len(rows)
        samples = [sample(row.msg_id, tokens=row.tokens, **names) for row, names in zip(rows, named, strict=True)]
        transitions.record(connection, samples)
        for number, row in enumerate(rows):
            said = [Signal("rating", text="up" if number % 3 else "down"), Signal("comment", text=f"w{number} w3")]
            if number % 2:
                said.append(Signal("preferred_over", text=rows[number - 1].msg_id))
            if number % 4 == 0:
                said.append(Signal("correction", text="w1 w2 hello"))
            about: dict[str, Any] = {"task_id": None, "run_id": None, "rule": RewardConfig(), "learned": learned}
            about["key_name"] = f"key{number % 4}"
            transitions.apply_feedback(connection, msg_ids=[row.msg_id], signals=said, **about)
        transitions.commit(connection)
    with begin(lives, root) as process:
        wait_for(lambda: newest(root) == 1 or not process.alive, "a version", 240)
        assert process.stop() == 0, process.output()
    with ledger.read() as connection:
        stats = find_trainer(connection, "trainer").stats
    ledger.close()
    return load_file(root / version_path(1) / "model.safetensors"), stats


PREFERENCES = {"dpo/preferences": 6, "kto/rated": 8, "sft/learnt_tokens": 8}


@pytest.mark.parametrize(
    ("mix", "stage", "share", "expected"),
    [
        ("rewards", 3, 0.25, {}),
        ("preferences", 3, 0.25, PREFERENCES),
        ("teachers", 2, 0.25, {"hint/hints": 8}),  # an average of weights is whole on each rank
        *([("preferences", 3, 1.0, PREFERENCES)] if FULL else []),
    ],
)
def test_two_ranks_learn_what_one_learns_from_all_that_was_said(
    mix, stage, share, expected, tmp_path, lives, model, teacher, rows
):
    asked = MIXES[mix] | ({"distill": {"path": str(teacher)}} if mix == "teachers" else {})
    asked["max_share_per_key"] = share
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, figures = train(lives, tmp_path / "one", model, rows, **asked, deepspeed=ADAM)
    deepspeed = {**ADAM, "zero_optimization": {"stage": stage, **EVERYTHING_PARTITIONED}}
    two_of_them = {"ranks": 2, "deepspeed": deepspeed, "max_tokens_per_micro_batch": 40}
    two, same = train(lives, tmp_path / "two", model, rows, **asked, **two_of_them)
    for name, tensor in one.items():
        assert torch.allclose(two[name], tensor, atol=2e-5), name
    assert expected.items() <= figures.items()
    assert {name.partition("/")[0] for name in figures} >= set(asked["algorithms"]), "each found something to learn"
    assert any(name.endswith("largest_key_share") for name in figures) == (share < 1)
    assert same == pytest.approx({**figures, "seconds": same["seconds"]}, rel=1e-3, abs=1e-4)
