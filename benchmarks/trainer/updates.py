"""One contestant's process for whole updates by the trainer's own code.

Each line on stdin is the name of a case: the process makes one update and prints its figures. An update precomputes,
including the base model's or a teacher's logprobs, and then takes its steps: one for those compared with TRL's, as TRL
takes one, and the default number for the others.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.trainer.cases import Row, is_up, rows
from benchmarks.trainer.clock import seconds
from services.trainer import build_update
from shared.config import Config
from shared.experience import Experience, Other, Sampling, Tokens
from shared.ledger.connect import Ledger
from shared.reward import Signal
from shared.versions import version_path
from trainer_service.base_version import ensure_base_version
from trainer_service.learner import Learner
from trainer_service.ranks import Ranks, join_ranks

_ONE_STEP: dict[str, Any] = {"epochs": 1, "minibatches": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "dpo": _ONE_STEP,
    "kto": _ONE_STEP,
    "reinforce_pp": {},
    "hint": {"hint": {"least_effect": 0.0, "neutral_reward": None}},  # uses all words
}


def experiences(found: list[Row]) -> list[Experience]:
    """The rows as a trainer reads them from its ledger, with all feedback of such a case."""
    read = []
    for number, row in enumerate(found):
        name, signals = str(number), [Signal("rating", text="up" if is_up(number) else "down")]
        tokens, others = _tokens(row.prompt, row.reply), ()
        if row.other is not None:
            others = (Other(f"{name}-other", _tokens(row.prompt, row.other), Sampling()),)
        words = None if row.words is None else np.array(row.words, np.int32)
        about: dict[str, Any] = {"signals": tuple(signals), "preferred_over": others, "hint": words}
        reward, run = float(is_up(number)), row.run
        read.append(Experience(number, name, 0, None, "task", run, name, 0, reward, 0.0, tokens, Sampling(), **about))
    return read


def _tokens(prompt: list[int], reply: list[int]) -> Tokens:
    return Tokens(np.array(prompt, np.int32), np.array(reply, np.int32), np.full(len(reply), -10, np.float32))


def config_of(name: str, folder: str, root: str) -> Config:
    """The configuration of one contestant. folder: the model's."""
    trainer = {"algorithm": name, "cpu_threads": 1, "max_tokens_per_micro_batch": 8192, **SETTINGS[name]}
    return Config.model_validate({"root_dir": root, "model": {"path": folder}, "trainer": trainer})


def begin(config: Config) -> None:
    """Write version 0 into the root folder."""
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
        ensure_base_version(config, ledger)


def learner_of(config: Config, ranks: Ranks) -> Learner:
    """The trainer's models, on this rank."""
    torch.set_num_threads(1)
    return Learner(partial(build_update, config, config.root / version_path(0), ranks), ranks)


def main() -> None:
    name, folder, device = sys.argv[1:]
    with tempfile.TemporaryDirectory() as root:
        config = config_of(name, str(Path(folder).absolute()), root)
        begin(config)
        learner = learner_of(config, join_ranks(60))
        for step, line in enumerate(sys.stdin):
            found = experiences(rows(line.strip()))
            began = seconds(device)
            stats = learner.train(found, step=step, version=step)
            figures = {"seconds": seconds(device) - began, **learner.costs, "grad_norm": stats["grad_norm"]}
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
