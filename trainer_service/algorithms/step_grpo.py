"""GRPO by turn: each turn of the attempts at a task is compared with the same turn of the others.

    Â_i  = (G_i − mean G_i) / std G_i    over the i-th turns of the attempts at one task
    G_i  = R + Σ_{j≥i} r_j               R: the outcome of the whole; r_j: the reward of turn j
    loss = −E[ w_t · J_t ] + β E[ KL_t ]                       J_t: PPO's clipped objective; it and w_t: surrogates.py

A reward for one turn gives no credit to the turns after it (process supervision: Shao et al. 2024, "DeepSeekMath",
section 4.1.3; by step: Feng et al. 2025, "GiGPO", arXiv 2505.10978). With only an outcome and equally many turns, this
is GRPO.

Departures, each with its source or reason:
1. Turns are compared by their number, not by equal states: states in production do not repeat.
2. A turn that no other attempt reached is compared with the mean of all turns.
3. E is the mean over all tokens of the minibatch, and a group is a task as callers name it; see grpo.
"""

from __future__ import annotations

from shared.config import StepGRPOConfig
from trainer_service.algorithms.attempts import group_advantages
from trainer_service.algorithms.seam import Batch, Constants, Figures, Memory, Precomputed, Unit
from trainer_service.algorithms.surrogates import PolicyGradient, policy_constants


class StepGRPO(PolicyGradient[StepGRPOConfig]):
    def constants(
        self, batch: Batch, units: list[Unit], precomputed: Precomputed, memory: Memory
    ) -> tuple[Constants, Figures]:
        constants, figures = policy_constants(batch, units, precomputed, self.config)
        constants["advantages"], compared = group_advantages(
            batch, units, precomputed, self.config, memory, by_turn=True
        )
        return constants, figures | compared
