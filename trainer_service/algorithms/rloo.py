"""RLOO (Ahmadian et al. 2024, "Back to Basics", arXiv 2402.14740; Kool et al. 2019): leave-one-out baselines.

    Â    = R − mean of the others' R     over the other attempts at the same task; R: return of an attempt
    loss = −E[ w_t · J_t ] + β E[ KL_t ]                       J_t: PPO's clipped objective; it and w_t: surrogates.py

The baseline does not depend on the attempt itself: the gradient is unbiased, without division by a deviation.

Departures, each with its source or reason:
1. The paper takes one step for each batch, without a ratio. With J_t, one batch can be used for several steps.
2. The KL penalty is in the loss; `kl_in: reward` with `kl: k1` subtracts it from R, as in the paper.
3. A single attempt at a task is compared with the mean of all attempts; a group is a task as callers name it.
"""

from __future__ import annotations

from shared.config import RLOOConfig
from trainer_service.algorithms.attempts import group_advantages
from trainer_service.algorithms.seam import Batch, Constants, Figures, Memory, Precomputed, Unit
from trainer_service.algorithms.surrogates import PolicyGradient, policy_constants


class RLOO(PolicyGradient[RLOOConfig]):
    def constants(
        self, batch: Batch, units: list[Unit], precomputed: Precomputed, memory: Memory
    ) -> tuple[Constants, Figures]:
        constants, figures = policy_constants(batch, units, precomputed, self.config)
        constants["advantages"], compared = group_advantages(
            batch, units, precomputed, self.config, memory, leave_one_out=True
        )
        return constants, figures | compared
