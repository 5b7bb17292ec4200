"""GRPO (Shao et al. 2024, "DeepSeekMath", arXiv 2402.03300): attempts at a task are compared with their mean.

    Â    = (R − mean R) / std R          over the attempts at one task; R: return of an attempt
    loss = −E[ w_t · J_t ] + β E[ KL_t ]                       J_t: PPO's clipped objective; it and w_t: surrogates.py
    KL_t = π_ref/π_θ − 1 − log π_ref/π_θ                                                                        eq. 4

Departures, each with its source or reason:
1. E is the mean over all tokens of the minibatch: the paper's mean over sequences (`mean: sequences`) makes long bad
   answers cheap (Yu et al. 2025, "DAPO", section 3.3).
2. A single attempt at a task is compared with the mean of all attempts: production cannot sample it again.
3. A group is a task as callers name it; its prompts need not be equal.
"""

from __future__ import annotations

from shared.config import GRPOConfig
from trainer_service.algorithms.attempts import group_advantages
from trainer_service.algorithms.seam import Batch, Constants, Figures, Memory, Precomputed, Unit
from trainer_service.algorithms.surrogates import PolicyGradient, policy_constants


class GRPO(PolicyGradient[GRPOConfig]):
    def constants(
        self, batch: Batch, units: list[Unit], precomputed: Precomputed, memory: Memory
    ) -> tuple[Constants, Figures]:
        constants, figures = policy_constants(batch, units, precomputed, self.config)
        constants["advantages"], compared = group_advantages(batch, units, precomputed, self.config, memory)
        return constants, figures | compared
