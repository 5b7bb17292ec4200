"""Peak memory of scoring, in units of one float32 array of all tokens' logits.

A separate process for each method: 2,048 sampled tokens, vocabulary 151,936, every other token with top-p 0.8, a head
of 256. "processed" computes logprobs and the sampler's logprobs, "plain" logprobs alone, as TRL does, "update" logprobs
and their gradient.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.trainer.peak import CHUNK_BYTES, TOKENS, measure
from trainer_service import head, logprobs
from trainer_service.head import LogitShape, Question, ScoringHead
from trainer_service.logprobs import SamplingTensors

SPREADS = {"flat": "0.3", "steep": "3"}  # logits of an untrained model, and of a trained one


def main() -> None:
    chunked, update, processed = sys.argv[1] == "chunked", sys.argv[2] == "update", sys.argv[2] == "processed"
    head.CHUNK_BYTES = {"cpu": CHUNK_BYTES}
    ones = torch.ones(TOKENS)
    sampling = SamplingTensors(ones, torch.tensor([1.0, 0.8])[torch.arange(TOKENS) % 2], 0 * ones, 0 * ones)

    def score(layer: nn.Linear, hidden_KD: Tensor, actions_K: Tensor) -> Tensor:
        if chunked:
            ours = ScoringHead.replacing(layer, LogitShape())
            return ours.score(hidden_KD, Question(actions_K, sampling, processed=processed))["logprobs"]
        return logprobs.score(layer(hidden_KD), actions_K, sampling, processed=processed)["logprobs"]

    print(measure(float(sys.argv[3]), score, update=update))


def peaks(repository: Path, peers: str | None) -> dict[str, float]:
    """The peaks of all methods. TRL computes its own logprobs, in chunks of its own size and of ours."""
    found = {}
    for step in ("processed", "plain", "update"):
        for name, spread in SPREADS.items():
            for way in ("chunked", "whole"):
                found[f"{way}_{step}_{name}"] = _run(repository, sys.executable, "trainer.memory", way, step, spread)
        if peers and step != "processed":
            for way in ("own", "equal"):
                found[f"trl_{step}_{way}_chunk"] = _run(repository, peers, "peers.trl_memory", way, step, "3")
            found[f"{step}_of_trl_equal_chunk"] = found[f"chunked_{step}_steep"] / found[f"trl_{step}_equal_chunk"]
    return found


def _run(repository: Path, python: str, module: str, *arguments: str) -> float:
    command = [python, "-m", f"benchmarks.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=repository)
    return float(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
