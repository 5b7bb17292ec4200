"""REINFORCE++ (Hu et al. 2025, "REINFORCE++", arXiv 2501.03262).

    G_t  = Σ_{i≥t} γ^{i−t} r_i           r_i: reward minus the KL penalty of token i
    Â_t  = (G_t − mean G) / std G        over all tokens of the batch: a global baseline instead of a critic
    loss = −E[ w_t · J_t ] − c_e H[π_θ]                        J_t: PPO's clipped objective; it and w_t: surrogates.py

Departures, each with its source or reason:
1. While batches are small, mean and standard deviation include earlier batches (running moments).
   A batch of equal rewards then teaches whether they are better than earlier ones.
2. π_prox is the policy at the start of the batch; w_t corrects for the policy that sampled; see surrogates.py.
3. Outliers among rewards are bounded; see advantages.bound_outliers.

E is the mean over all sampled tokens of the minibatch, or as `mean` sets it.
"""

from __future__ import annotations

from shared.config import ReinforcePPConfig
from trainer_service.algorithms.advantages import returns, running_moments, shaped_rewards, standardize
from trainer_service.algorithms.seam import Batch, Constants, Figures, Memory, Precomputed, Unit
from trainer_service.algorithms.surrogates import PolicyGradient, policy_constants


class ReinforcePP(PolicyGradient[ReinforcePPConfig]):
    def constants(
        self, batch: Batch, units: list[Unit], precomputed: Precomputed, memory: Memory
    ) -> tuple[Constants, Figures]:
        constants, figures = policy_constants(batch, units, precomputed, self.config)
        rewards = shaped_rewards(batch, units, precomputed, self.config, memory)
        earned = [returns(r, self.config.gamma) for r in rewards]
        mean, std = running_moments(memory, earned, self.config.baseline_sequences)
        constants["advantages"] = standardize(earned, mean, std)
        return constants, figures | {"baseline": mean}
