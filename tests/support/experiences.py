"""Rows for trainer tests: sampled from a real model, recorded and committed through the ledger's own transitions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from sqlalchemy import update

from shared.config import Config, RewardConfig
from shared.experience import Experience, Sample, Sampling, Tokens
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import experiences
from shared.reward import Signal


def make_experiences(model_folder: Path, count: int, *, seed: int = 0, reply_tokens: int = 6) -> list[Experience]:
    """Random prompts and replies, with the model's own logprobs; reward: the share of even tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    vocabulary = model.config.vocab_size
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        prompt = draw.integers(4, vocabulary, draw.integers(4, 12)).astype(np.int32)
        reply = draw.integers(4, vocabulary, reply_tokens).astype(np.int32)
        ids = torch.from_numpy(np.concatenate([prompt, reply]).astype(np.int64))[None]
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1], -1)
        behaviour = logprobs[torch.arange(len(reply)), torch.from_numpy(reply.astype(np.int64))].numpy()
        rows.append(
            Experience(
                id=number + 1,
                msg_id=f"chatcmpl-{seed}-{number}",
                choice=0,
                parent_id=None,
                task_id=None,
                run_id=None,
                conversation_id=f"chatcmpl-{seed}-{number}",
                version=0,
                reward=float((reply % 2 == 0).mean()),
                created_at=time.time(),
                tokens=Tokens(prompt, reply, behaviour.astype(np.float32)),
                sampling=Sampling(),
            )
        )
    return rows


def samples_of(rows: list[Experience]) -> list[Sample]:
    """The samples that an explorer would have recorded."""
    return [
        Sample(
            msg_id=row.msg_id,
            choice=row.choice,
            version=row.version,
            version_end=row.version,
            tokens=row.tokens,
            sampling=row.sampling,
            finish_reason="stop",
            created_at=row.created_at,
            latency_s=0.01,
        )
        for row in rows
    ]


def record_ready(ledger: Ledger, rows: list[Experience], key_name: str | None = None) -> None:
    """Record, reward and commit the rows, like chats, feedback and commits."""
    with ledger.write() as connection:
        transitions.record(connection, samples_of(rows))
        for rewarded in _rewarded_at_once(rows):
            for row in rewarded:
                if row.conversation_id != row.msg_id:
                    mine = update(experiences).where(experiences.c.msg_id == row.msg_id)
                    connection.execute(mine.values(conversation_id=row.conversation_id))
            transitions.apply_feedback(
                connection,
                msg_ids=[row.msg_id for row in rewarded],
                task_id=None,
                run_id=None,
                signals=[Signal("reward", value=rewarded[0].reward)],
                rule=RewardConfig(),
                key_name=key_name,
            )
        transitions.commit(connection)


def _rewarded_at_once(rows: list[Experience]) -> Iterator[list[Experience]]:
    """Neighbours of equal reward, each of another conversation; otherwise the feedback would be about several turns."""
    together: dict[str, Experience] = {}  # by conversation
    reward: float | None = None
    for row in rows:
        if together and (row.reward != reward or row.conversation_id in together):
            yield list(together.values())
            together = {}
        together[row.conversation_id], reward = row, row.reward
    if together:
        yield list(together.values())


def trainer_config(root: Path, model_folder: Path, lora: dict[str, object] | None = None, **trainer: object) -> Config:
    """lora: the settings of `model.lora`; None: all weights are trained.

    The change of an update has no bound: a few rows change everything in a model of random weights.
    """
    kind = {"kind": "full"} if lora is None else {"kind": "lora", "lora": lora}
    return Config.model_validate(
        {
            "root_dir": str(root),
            "model": {"path": str(model_folder), **kind},
            "trainer": {
                "batch_size": 8,
                "learning_rate": 1e-3,
                "poll_interval_s": 0.05,
                "cpu_threads": 1,
                "breaker": {"change_of_update": None},
                **trainer,
            },
        }
    )


def rows(count: int, version: int = 0, name: str = "m") -> list[Experience]:
    """Rows of one token each, equal except for their names."""
    tokens = Tokens(np.array([1], np.int32), np.array([2], np.int32), np.array([-0.5], np.float32))
    return [
        Experience(0, f"{name}{n}", 0, None, None, None, f"{name}{n}", version, 1.0, 0.0, tokens, Sampling())
        for n in range(count)
    ]
