"""TRL's trainers in the place of ours: the loop that a user would write around them.

TRL has no stream, so a peer is our case with another learner: the same customers, draws, delays, sampler, seeds and
base model. Feedback is collected as it arrives. When an update's rows are complete, TRL's trainer learns from them in a
process of the peers' Python (benchmarks/peers/trl_learner.py), and its weights are sampled from then on. The oldest
rows come first, one update a version. A peer may get rows of earlier updates again, like our `rehearse`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model
from transformers import AutoModelForCausalLM

from benchmarks.learning.cases import CASES
from benchmarks.learning.run import Plan, Said
from benchmarks.learning.world import HINT, Reply, World
from shared.config import HintConfig
from shared.experience import Experience, Sampling
from shared.reward import Signal
from trainer_service.answers import AnswerTokenizer
from trainer_service.hints import HintWriter

REPOSITORY = Path(__file__).parents[2]
MODULE = "benchmarks.peers.trl_learner"


@dataclass(frozen=True, slots=True)
class Peer:
    """One trainer of TRL."""

    like: str  # our case, whose customers, delays, versions and rows it shares
    trainer: str  # in trl_learner
    settings: dict[str, Any]  # of trl_learner
    rows: int | None = None  # in an update; None: as in our case
    again: int = 0  # rows of earlier updates in each, as a multiple of `rows`

    @property
    def plan(self) -> Plan:
        """The feedback, its delays, and the number of replies with it."""
        ours = CASES[self.like]
        return replace(ours, rows=self.rows or ours.rows)


_STEPS: dict[str, Any] = {"epochs": 2, "minibatches": 4, "learning_rate": 3e-4}
_FAST: dict[str, Any] = {**_STEPS, "learning_rate": 1e-3, "epochs": 4}
_SDPO: dict[str, Any] = {
    "epochs": 8, "minibatches": 2, "learning_rate": 1e-3,
    "teacher_model_kind": "base", "distillation_mode": "full_logits", "distillation_alpha": 0.0,
}  # fmt: skip
_WITH_SFT: dict[str, Any] = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]}
_IN_BALANCE: dict[str, Any] = {"undesirable_weight": 0.25}  # as TRL advises: a fourth to a third of ratings are up

PEERS: dict[str, Peer] = {
    "sparse/TRL GRPO": Peer("sparse/reinforce_pp", "grpo", {**_STEPS, "beta": 0.1}),
    "sparse/TRL KTO": Peer("sparse/kto", "kto", {**_STEPS, "epochs": 3, "minibatches": 2, **_IN_BALANCE}),
    "sparse/TRL SDPO": Peer("sparse/hint", "sdpo", _SDPO),
    "sparse/TRL SDPO and rows again": Peer("sparse/hint", "sdpo", _SDPO, again=4),
    "sparse/TRL SDPO and rows again faster": Peer("sparse/hint", "sdpo", {**_SDPO, "learning_rate": 1.5e-3}, again=4),
    "comments/TRL SDPO": Peer("comments/hint", "sdpo", _SDPO),
    "corrections/TRL SFT": Peer("corrections/sft", "sft", _FAST),
    "corrections/TRL DPO": Peer("corrections/dpo", "dpo", {**_STEPS, **_WITH_SFT}),
}


class RowWriter:
    """Makes rows for TRL from replies and their feedback. Texts become tokens as in our trainer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._answers = AnswerTokenizer(tokenizer, vocabulary=len(tokenizer), longest=None)
        self._hints = HintWriter(tokenizer, HintConfig.model_validate(HINT), None)

    def row(self, reply: Reply, signals: list[Signal]) -> dict[str, Any]:
        """A row with everything that a trainer may need."""
        tokens, said = reply.tokens, tuple(signals)
        row: dict[str, Any] = {"prompt": tokens.prompt_ids.tolist(), "reply": tokens.reply_ids.tolist()}
        row["logprobs"] = [float(one) for one in tokens.logprobs]
        heard = Experience(1, "m", 0, None, None, None, "m", 0, None, 0.0, tokens, Sampling(), signals=said)
        for signal in signals:
            if signal.kind == "reward":
                row["reward"] = signal.value
            elif signal.kind == "rating":
                row["up"] = signal.text == "up"
            elif signal.kind == "correction":
                (written,) = self._answers.with_corrections([heard])
                says_the_same = written.correction is None  # SFT learns from it, and DPO gets no gradient from it
                row["correction"] = row["reply"] if says_the_same else written.correction.tolist()
            elif signal.kind == "comment":
                (written,) = self._hints.write([heard])
                row["hint"] = written.hint.tolist()
        return row


class TrlDesk:
    """A trainer of TRL in the place of our Desk."""

    def __init__(
        self,
        policy: torch.nn.Module,
        writer: RowWriter,
        rows: int,
        process: subprocess.Popen[str],
        weights: Path,
        again: int = 0,
    ) -> None:
        """rows: new ones in an update. again: rows of earlier updates, as a multiple of `rows`.

        process: answers each line of rows with a line of figures, after it has written the weights.
        """
        self.policy = policy
        self._writer, self._process, self._weights = writer, process, weights
        self._rows, self._again = rows, again
        self._replies: dict[str, Reply] = {}
        self._ready: list[dict[str, Any]] = []
        self._learnt: list[dict[str, Any]] = []
        self._draw = random.Random(0)

    def record(self, names: list[str], replies: list[Reply], version: int) -> None:
        self._replies |= dict(zip(names, replies, strict=True))

    def hear(self, said: list[Said]) -> bool:
        self._ready += [self._writer.row(self._replies.pop(name), signals) for name, signals, _ in said]
        return len(self._ready) >= self._rows

    def update(self, version: int) -> dict[str, float]:
        new, self._ready = self._ready[: self._rows], self._ready[self._rows :]
        rows = new + self._drawn(new)
        self._learnt += new
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(rows) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"TRL's process ended with {self._process.wait()}")
        load_model(self.policy, self._weights)
        figures: dict[str, float] = json.loads(answer)
        return figures

    def _drawn(self, new: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows of earlier updates. TRL needs the same number each time, so the first few updates repeat some."""
        wanted = self._again * len(new)
        drawn = self._draw.sample(self._learnt, min(wanted, len(self._learnt)))
        return drawn + self._draw.choices([*new, *self._learnt], k=wanted - len(drawn))


def _environment() -> dict[str, str]:
    """Our environment without the variables of our own ranks: TRL would wait for those ranks."""
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


@contextlib.contextmanager
def open_trl(base: Path, world: World, peer: Peer, seed: int, python: str) -> Iterator[TrlDesk]:
    """A trainer of TRL in its own process. python: of a virtual environment with requirements/peers.txt."""
    policy = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        weights, rows = Path(folder) / "model.safetensors", peer.plan.rows * (1 + peer.again)
        about: dict[str, Any] = {"base": str(base), "trainer": peer.trainer, "settings": peer.settings}
        about |= {"rows": rows, "seed": seed, "weights": str(weights)}
        process = subprocess.Popen(
            [python, "-m", MODULE, json.dumps(about)], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**_environment(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip
        with process:
            try:
                yield TrlDesk(policy, RowWriter(world.tokenizer), peer.plan.rows, process, weights, peer.again)
            finally:
                process.kill()
