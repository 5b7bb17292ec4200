"""Each algorithm raises the reward of a small model, and does not when every reward is another sample's.

One token is sampled behind any prompt, by the policy itself; it is worth 1 when its id is even.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.experience import Experience, Other, Sampling, Tokens
from shared.reward import Signal
from tests.integration.test_update import build
from tests.support.batches import rows_batch
from tests.support.forms import FULL

UPDATES, ROWS = 12, 64
SETTINGS = {
    "ppo": {"ppo": {"kl_coef": 0.0}},
    "reinforce_pp": {"algorithm": "reinforce_pp", "reinforce_pp": {"kl_coef": 0.0}},
    "raft": {"algorithm": "raft", "raft": {"above": 0.5}},
    "dpo": {"algorithm": "dpo"},
    "kto": {"algorithm": "kto"},
    "mix": {"algorithms": {"ppo": 1.0, "reinforce_pp": 0.5, "raft": 0.2}, "raft": {"above": 0.5}},
}


def next_token_logprobs(policy, prompts: np.ndarray) -> torch.Tensor:
    """log π of every token behind each prompt: [rows, vocabulary]."""
    policy.eval()
    with torch.no_grad():
        return policy(input_ids=torch.from_numpy(prompts)).logits[:, -1].log_softmax(-1)


def sample_rows(
    policy, draw: np.random.Generator, version: int, *, shuffled: bool, paired: bool = False
) -> list[Experience]:
    """paired: each two are replies to one prompt."""
    prompts = draw.integers(4, 200, (ROWS, 5))
    if paired:
        prompts[1::2] = prompts[::2]
    logprobs = next_token_logprobs(policy, prompts).double().exp().numpy()
    replies = [draw.choice(len(p), p=p / p.sum()) for p in logprobs]
    rewards = [float(reply % 2 == 0) for reply in replies]
    if shuffled:
        rewards = draw.permutation(rewards).tolist()
    return [
        Experience(
            id=number + 1,
            msg_id=f"m{number}",
            choice=0,
            parent_id=None,
            task_id=None,
            run_id=None,
            conversation_id=f"m{number}",
            version=version,
            reward=reward,
            created_at=0.0,
            tokens=Tokens(prompt.astype(np.int32), np.array([reply], np.int32), np.log([p[reply]]).astype(np.float32)),
            sampling=Sampling(),
        )
        for number, (prompt, reply, reward, p) in enumerate(zip(prompts, replies, rewards, logprobs, strict=True))
    ]


def as_preferences(rows: list[Experience]) -> list[Experience]:
    """Of each two replies to one prompt the better one is preferred."""
    told = []
    for pair in zip(rows[::2], rows[1::2], strict=True):
        worse, better = sorted(pair, key=lambda row: row.reward)
        if better.reward != worse.reward:
            better = replace(better, preferred_over=(Other(worse.msg_id, worse.tokens, worse.sampling),))
        told += [worse, better]
    return told


def as_ratings(rows: list[Experience]) -> list[Experience]:
    """A thumb for each reply, and nothing else."""
    return [replace(row, reward=None, signals=(Signal("rating", text="up" if row.reward else "down"),)) for row in rows]


AS_SAID = {"dpo": as_preferences, "kto": as_ratings}


def learn(root: Path, base: Path, *, shuffled: bool, **settings) -> tuple[float, float]:
    """The policy's expected reward before and after some updates."""
    update, policy = build(root, base, learning_rate=1e-3, **settings)
    prompts = np.random.default_rng(1).integers(4, 200, (256, 5))

    def expected() -> float:
        return float(next_token_logprobs(policy, prompts).exp()[:, 0::2].sum(-1).mean())

    before, draw = expected(), np.random.default_rng(0)
    for step in range(UPDATES):
        said = AS_SAID.get(settings.get("algorithm", ""), list)
        rows = said(sample_rows(policy, draw, step, shuffled=shuffled, paired=said is as_preferences))
        stats = update.update(rows_batch(rows), step=step, version=step)
        assert stats.get("logprob_gap_max", 0.0) < 1e-4
    return before, expected()


@pytest.mark.parametrize("name", [name for name in SETTINGS if FULL or name != "mix"])
def test_the_reward_rises_and_with_shuffled_rewards_it_does_not(name, tmp_path, model):
    before, after = learn(tmp_path / "honest", model, shuffled=False, **SETTINGS[name])
    _, controlled = learn(tmp_path / "shuffled", model, shuffled=True, **SETTINGS[name])
    assert after > before + 0.05
    assert controlled < before + 0.04
