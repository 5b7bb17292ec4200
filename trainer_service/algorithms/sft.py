"""Supervised fine-tuning: the likelihood of written answers.

    loss = −E[ log π_θ(a_t|s_t) ]        over all tokens of written answers: corrections and demonstrations

log π_θ is at the temperature of the conversation that the answer belongs to. E is the mean over the tokens of the
minibatch. `raft` learns from the model's own good replies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from shared.config import SFTConfig
from trainer_service.algorithms.seam import (
    Batch,
    Constants,
    Figures,
    Memory,
    Needs,
    Now,
    Precomputed,
    Said,
    Unit,
    one_each,
    pick,
)


@dataclass(frozen=True, slots=True)
class SFT:
    config: SFTConfig

    @property
    def needs(self) -> Needs:
        return Needs.NOTHING

    def units(self, batch: Batch) -> list[Unit]:
        return one_each(batch.written, Said.ANSWER)

    def constants(
        self, batch: Batch, units: list[Unit], precomputed: Precomputed, memory: Memory
    ) -> tuple[Constants, Figures]:
        lengths = [len(sequence.actions) for sequence in pick(batch.sequences, units)]
        return {"weights": [np.ones(n, np.float32) for n in lengths]}, {"learnt_tokens": float(sum(lengths))}

    def size(self, units: list[Unit], constants: Constants) -> float:
        return float(sum(map(len, constants["weights"])))

    def loss(self, now: Now, constants: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -(constants["weights"] * now.logprobs_K).sum()
        return loss, {"negative_log_likelihood": loss.detach()}
