"""Comments alone, from the ledger to a changed policy: the same rows with other rows' comments teach nothing.

The right reply depends on the prompt's last token, and nothing but a comment ever names it. The model has learnt two
things before: to say the word that a hint names, and without a hint any of four words alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.trainer import build_update, preparations
from shared.config import Config, HintConfig, RewardConfig
from shared.experience import Experience, Sampling, Tokens
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.reward import Signal
from shared.stop_request import StopRequest
from shared.versions import version_path
from tests.integration.test_learning import next_token_logprobs
from tests.support.experiences import samples_of, trainer_config
from tests.support.models import make_tiny_model
from trainer_service.base_version import ensure_base_version
from trainer_service.claim import Claimer
from trainer_service.hints import HintWriter
from trainer_service.learner import Learner
from trainer_service.ranks import join_ranks

NAMES = ("w10", "w11", "w12", "w13")
WORDS = np.array([18, 19, 20, 21])  # their ids
KINDS = np.array([50, 51, 52, 53])  # what a prompt may end with: the first asks for the first word, and so on
COMMENT = "hello {text}"
STEPS, ROUNDS, ROWS = 100, 16, 64
SETTINGS: dict[str, Any] = {"algorithm": "hint", "hint": {"comment": COMMENT}, "batch_size": ROWS}


def prompts(draw: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts, and which word each asks for."""
    asked = draw.integers(0, len(WORDS), count)
    return np.concatenate([draw.integers(60, 200, (count, 3)), KINDS[asked][:, None]], axis=1), asked


@pytest.fixture(scope="module")
def follower(tmp_path_factory) -> Path:
    """A tiny model that follows hints."""
    folder = make_tiny_model(tmp_path_factory.mktemp("follower") / "base")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    writer = HintWriter(AutoTokenizer.from_pretrained(folder), HintConfig(comment=COMMENT), None)
    blank = Tokens(np.array([60], np.int32), np.array([18], np.int32), np.zeros(1, np.float32))
    said = [row_of(n, blank, Signal("comment", text=name)) for n, name in enumerate(NAMES)]
    blocks = np.stack([row.hint for row in writer.write(said)]).astype(np.int64)
    optimizer, draw = torch.optim.AdamW(model.parameters(), lr=3e-3), np.random.default_rng(0)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / STEPS)
        hinted, named = prompts(draw, 48)[0], draw.integers(0, len(WORDS), 48)
        behind = torch.from_numpy(np.concatenate([blocks[named], hinted], axis=1))
        loss = torch.nn.functional.cross_entropy(model(behind).logits[:, -1], torch.from_numpy(WORDS[named]))
        plain = model(torch.from_numpy(prompts(draw, 48)[0])).logits[:, -1].log_softmax(-1)
        (loss - plain[:, WORDS].mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """More cost more than they gain in a model of this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def row_of(number: int, tokens: Tokens, *signals: Signal) -> Experience:
    name = f"m{number}"
    return Experience(number, name, 0, None, None, None, name, 0, None, 0.0, tokens, Sampling(), signals=signals)


def record_commented(ledger: Ledger, config: Config, rows: list[Experience], comments: list[str]) -> None:
    """As chats, feedback and commits would."""
    with ledger.write() as connection:
        transitions.record(connection, samples_of(rows))
        for row, text in zip(rows, comments, strict=True):
            transitions.apply_feedback(
                connection,
                msg_ids=[row.msg_id],
                task_id=None,
                run_id=None,
                signals=[Signal("comment", text=text)],
                rule=RewardConfig(),
                learned=config.trainer.learns_from,
            )
        transitions.commit(connection)


@contextlib.contextmanager
def trainer(root: Path, base: Path, **settings: Any) -> Iterator[tuple[Config, Ledger, Learner, Claimer]]:
    config = trainer_config(root, base, **{**SETTINGS, **settings})
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
        ensure_base_version(config, ledger)
        torch.manual_seed(0)
        ranks = join_ranks(60)
        start = config.root / version_path(0)
        learner = Learner(lambda: build_update(config, start, ranks), ranks, None, preparations(config, StopRequest()))
        yield config, ledger, learner, Claimer(ledger, config.trainer, StopRequest(), learner.vocabulary)


def learn(root: Path, base: Path, *, shuffled: bool) -> tuple[float, float]:
    """How likely the right word is, before and after some updates."""
    draw, (asked_now, right) = np.random.default_rng(2), prompts(np.random.default_rng(1), 256)
    with trainer(root, base) as (config, ledger, learner, claimer):

        def reward() -> float:
            found = next_token_logprobs(learner.policy, asked_now)[torch.arange(256), torch.from_numpy(WORDS[right])]
            return float(found.exp().mean())

        before = reward()
        for step in range(ROUNDS):
            asked, wanted = prompts(draw, ROWS)
            likely = next_token_logprobs(learner.policy, asked).double().exp().numpy()
            replies = [draw.choice(len(p), p=p / p.sum()) for p in likely]
            rows = [
                row_of(
                    step * ROWS + n, Tokens(a.astype(np.int32), np.array([r], np.int32), np.log([p[r]]).astype("f4"))
                )
                for n, (a, r, p) in enumerate(zip(asked, replies, likely, strict=True))
            ]
            named = draw.permutation(wanted) if shuffled else wanted
            record_commented(ledger, config, rows, [NAMES[n] for n in named])
            lease = claimer.next()
            assert lease is not None
            stats = learner.train(learner.prepare(lease.rows), step=step, version=step)
            assert stats["hints"] == ROWS
        return before, reward()


def test_comments_alone_teach_and_those_of_other_rows_do_not(tmp_path, follower):
    before, after = learn(tmp_path / "honest", follower, shuffled=False)
    _, controlled = learn(tmp_path / "shuffled", follower, shuffled=True)
    assert before < 0.3
    assert after > 0.8
    assert controlled < before + 0.05
