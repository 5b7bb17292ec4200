"""A task that a tiny model learns in seconds: after an even prompt token an even reply token is worth 1, after an odd
one an odd token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shared.experience import Experience, Sampling, Tokens
from shared.reward import Signal
from tests.support.models import make_tiny_model

REWARD = 0.85  # of a model that has learnt the task
TEACHER = 0.95  # the reward of a teacher
END = 2  # the token that ends a reply


def logprobs(model: Any, prompts: np.ndarray) -> Any:
    """log π of every token after each prompt: [prompts, vocabulary]."""
    import torch

    return model(input_ids=torch.from_numpy(prompts)).logits[:, -1].log_softmax(-1)


def expected_reward(model: Any) -> float:
    """The expected reward over 128 fixed prompts."""
    import torch

    model.eval()
    prompts = np.random.default_rng(1).integers(4, 200, (128, 3))
    with torch.no_grad():
        even = logprobs(model, prompts).exp()[:, 0::2].sum(-1).numpy()
    return float(np.where(prompts[:, -1] % 2 == 0, even, 1 - even).mean())


def reward_of_folder(folder: Path) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    return expected_reward(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def make_taught_model(folder: Path) -> Path:
    """Make a small model that has learnt the task."""
    import torch
    from transformers import AutoModelForCausalLM

    make_tiny_model(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer, draw = torch.optim.Adam(model.parameters(), lr=3e-3), np.random.default_rng(0)
    reward = 0.0
    while reward < REWARD:
        prompts = draw.integers(4, 200, (128, 3))
        right = torch.from_numpy((np.arange(208) % 2 == prompts[:, -1:] % 2).astype(np.float32))
        rewards = (logprobs(model, prompts).exp()[:, :208] * right).sum(-1)
        loss, reward = -rewards.log().mean(), rewards.mean().item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


def sampled(model: Any, draw: np.random.Generator, count: int, *, pairs: bool = False) -> list[Experience]:
    """Replies of one token, sampled by the model, with their rewards. pairs: two replies to each prompt."""
    import torch

    prompts = draw.integers(4, 200, (count, 3))
    if pairs:
        prompts[1::2] = prompts[::2]
    with torch.no_grad():
        said = logprobs(model, prompts).double().numpy()
    made = []
    for number, (prompt, scores) in enumerate(zip(prompts, said, strict=True)):
        probabilities = np.exp(scores) / np.exp(scores).sum()
        reply = int(draw.choice(len(scores), p=probabilities))
        tokens = Tokens(prompt.astype(np.int32), np.array([reply], np.int32), scores[[reply]].astype(np.float32))
        name, reward = f"chatcmpl-{number}", float(reply % 2 == prompt[-1] % 2)
        made.append(Experience(number + 1, name, 0, None, None, None, name, 0, reward, 0.0, tokens, Sampling()))
    return made


def with_feedback(row: Experience, algorithm: str, draw: np.random.Generator) -> Experience:
    """The row with the feedback that the algorithm learns from, correct for the task."""
    if algorithm in ("grpo", "rloo", "step_grpo"):
        return replace(row, task_id=f"t{row.id % 4}", run_id=str(row.id))
    if algorithm == "kto":
        return replace(row, signals=(Signal("rating", text="up" if row.reward else "down"),))
    right = 10 + int(row.tokens.prompt_ids[-1] % 2) + 2 * int(draw.integers(0, 90))
    if algorithm in ("sft", "dpo"):
        return replace(row, correction=np.array([right, END], np.int32), reward=None)
    if algorithm == "hint":
        return replace(row, hint=np.array([1, 6, right, END], np.int32), reward=None)
    if algorithm == "distill":
        share = TEACHER if row.reward else 1 - TEACHER  # the teacher gives all even tokens, and all odd ones, the same
        return replace(row, teacher=np.log(np.array([share / 104], np.float32)), reward=None)
    return row
