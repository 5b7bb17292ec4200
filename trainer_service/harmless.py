"""An update that no row can spoil: when it fails as well, the settings or the machine are at fault."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from shared.experience import Experience, Sampling, Tokens
from trainer_service.algorithms.seam import (
    Batch,
    Constants,
    Figures,
    Memory,
    Needs,
    Now,
    Precomputed,
    Unit,
    one_each,
    pick,
)


def harmless_row() -> Experience:
    """Three tokens that every model knows, with the reward 1."""
    tokens = Tokens(np.zeros(1, np.int32), np.array([1, 0], np.int32), np.full(2, -1.0, np.float32))
    return Experience(0, "harmless", 0, None, None, None, "harmless", 0, 1.0, 0.0, tokens, Sampling())


class Likelihood:
    """−Σ log π_θ of what was sampled, and Σ V² where there is a critic: a step of every model, whatever was said."""

    @property
    def needs(self) -> Needs:
        return Needs.NOTHING

    def units(self, batch: Batch) -> list[Unit]:
        return one_each(range(len(batch.sequences)))

    def constants(
        self, batch: Batch, units: list[Unit], precomputed: Precomputed, memory: Memory
    ) -> tuple[Constants, Figures]:
        return {"tokens": [np.full(1, len(one.actions), np.float32) for one in pick(batch.sequences, units)]}, {}

    def size(self, units: list[Unit], constants: Constants) -> float:
        return float(sum(map(np.sum, constants["tokens"])))

    def loss(self, now: Now, constants: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -now.logprobs_K.sum()
        return loss if now.values_K is None else loss + now.values_K.square().sum(), {}
