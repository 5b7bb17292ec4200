"""Reward-ranked fine-tuning (Dong et al. 2023, "RAFT", arXiv 2304.06767): the likelihood of the best sampled replies.

    loss = −E[ log π_θ(a_t|s_t) ]        over the tokens of turns whose reward reaches a threshold

A turn's reward is its own, or else the outcome of its trajectory. The threshold is a quantile of the batch's rewards,
or a constant. This is expert iteration (Anthony et al. 2017) on a stream instead of in rounds.

Departures:
1. Replies are ranked within the batch instead of among several samples of one prompt: production has one sample.
2. A reply with the lowest reward is never learned: if all rewards of a batch are equal, no reply is.

log π_θ is at the temperature that the reply was sampled with. E is the mean over the learned tokens of the minibatch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from shared.config import RAFTConfig
from trainer_service.algorithms.seam import (
    Batch,
    Constants,
    Figures,
    Floats,
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
class RAFT:
    config: RAFTConfig

    @property
    def needs(self) -> Needs:
        return Needs.NOTHING

    def units(self, batch: Batch) -> list[Unit]:
        chosen = (place for place, counts in enumerate(self._counts(batch)) if counts.any())
        return one_each(chosen, Said.SCORE)

    def constants(
        self, batch: Batch, units: list[Unit], precomputed: Precomputed, memory: Memory
    ) -> tuple[Constants, Figures]:
        chosen = pick(self._counts(batch), units)
        return {"counts": chosen, "weights": chosen}, {"learnt_tokens": float(sum(map(np.sum, chosen)))}

    def size(self, units: list[Unit], constants: Constants) -> float:
        return float(sum(map(np.sum, constants["counts"])))

    def loss(self, now: Now, constants: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -(constants["weights"] * now.logprobs_K).sum()
        return loss, {"negative_log_likelihood": loss.detach()}

    def _counts(self, batch: Batch) -> list[Floats]:
        """For each sequence, [A]: 1 for learned tokens, 0 for others."""
        counts = [np.zeros(len(sequence.actions), np.float32) for sequence in batch.sequences]
        turns = _rewarded_turns(batch)
        good = self._are_good([reward for *_, reward in turns])
        for (place, begin, end, _), is_good in zip(turns, good, strict=True):
            if is_good:
                counts[place][begin:end] = 1
        return counts

    def _are_good(self, rewards: list[float]) -> list[bool]:
        above = self.config.above
        if above is not None:
            return [reward > above for reward in rewards]
        ranked = sorted(rewards)
        return [reward >= ranked[int(self.config.quantile * len(ranked))] and reward > ranked[0] for reward in rewards]


def _rewarded_turns(batch: Batch) -> list[tuple[int, int, int, float]]:
    """For each turn with a reward, return its sequence, its first action, the index after its last, and the reward."""
    found = []
    for trajectory, places in zip(batch.trajectories, batch.members, strict=True):
        for (number, begin, end), own in zip(trajectory.turn_spans(), trajectory.turn_rewards, strict=True):
            reward = trajectory.outcome if own is None else own
            if reward is not None:
                found.append((places[number], begin, end, reward))
    return found
