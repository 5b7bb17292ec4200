"""Proximal policy optimization with a critic (Schulman et al. 2017, "Proximal Policy Optimization Algorithms").

    L_CLIP = E[ w_t · J_t ]                                          eq. 7; J_t and w_t: surrogates.py
    L_V    = E[ ½ max( (V−R)², (V_old + clip(V−V_old, −ε_v, ε_v) − R)² ) ]           value clipping, as in its code
    loss   = −L_CLIP + c_v L_V − c_e H[π_θ]                                                           eq. 9

Departures, each with its source or reason:
1. π_prox is the policy at the start of the batch; w_t corrects for the policy that sampled; see surrogates.py.
2. The reward includes a KL penalty towards the base model for each token (Ziegler et al. 2019); see
   advantages.shaped_rewards.
3. Advantages come from GAE and are whitened over the batch.
4. The critic learns (R − μ)/σ with running moments of returns, so that neither c_v nor ε_v depends on the scale of
   rewards (as in Yu et al. 2022, "The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games", section 5.1).
5. Outliers among rewards are bounded, and so are advantages and returns (return_clip), so that one row cannot outweigh
   all others.

E is the mean over all sampled tokens of the minibatch, or as `mean` sets it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from shared.config import PPOConfig
from trainer_service.algorithms.advantages import gae, is_zero, running_moments, shaped_rewards, whiten
from trainer_service.algorithms.seam import Batch, Constants, Figures, Memory, Needs, Now, Precomputed, Unit, pick
from trainer_service.algorithms.surrogates import PolicyGradient, policy_constants, policy_loss, policy_needs, total

WINDOW = 1024  # number of sequences behind the scale of the critic's returns


class PPO(PolicyGradient[PPOConfig]):
    @property
    def needs(self) -> Needs:
        return Needs.VALUES | policy_needs(self.config)

    def constants(
        self, batch: Batch, units: list[Unit], precomputed: Precomputed, memory: Memory
    ) -> tuple[Constants, Figures]:
        config, bound = self.config, self.config.return_clip
        constants, figures = policy_constants(batch, units, precomputed, config)
        rewards, scaled = shaped_rewards(batch, units, precomputed, config, memory), pick(precomputed.values, units)
        mean, std = _scale(memory)
        values = [v * std + mean for v in scaled]
        estimates = [gae(r, v, config.gamma, config.lam) for r, v in zip(rewards, values, strict=True)]
        advantages = [advantage.clip(-bound, bound) for advantage, _ in estimates]
        returns = [target.clip(-bound, bound) for _, target in estimates]
        if config.normalize_returns:
            running_moments(memory, returns, WINDOW)
        mean, std = _scale(memory)
        memory["updates"] = memory.get("updates", 0) + 1
        warming = memory["updates"] <= config.critic_warmup
        constants["advantages"] = whiten(advantages) if config.normalize_advantages else advantages
        constants["returns"] = [(target - mean) / std for target in returns]
        constants["old_values"] = scaled
        constants["policy_weight"] = [np.full(1, 0.0 if warming else 1.0, np.float32)] * len(scaled)
        flat, errors = np.concatenate(returns), np.concatenate(returns) - np.concatenate(values)
        figures["explained_variance"] = float(1 - np.var(errors) / (np.var(flat) + 1e-8))
        return constants, figures

    def loss(self, now: Now, constants: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        config, returns_K, old_K = self.config, constants["returns"], constants["old_values"]
        assert now.values_K is not None
        loss, sums = policy_loss(now, constants, config)
        error_K = (now.values_K - returns_K).square()
        if config.value_clip > 0:
            moved_K = (now.values_K - old_K).clamp(-config.value_clip, config.value_clip)
            error_K = torch.maximum(error_K, (old_K + moved_K - returns_K).square())
        value_loss = 0.5 * total(error_K, constants)
        sums["value_loss"] = value_loss.detach()
        return constants["policy_weight"][0] * loss + config.value_coef * value_loss, sums


def _scale(memory: Memory) -> tuple[np.float32, np.float32]:
    """Return mean and standard deviation of the returns that the critic has learned; 0 and 1 at first."""
    mean, std = memory.get("mean", 0.0), math.sqrt(memory.get("variance", 1.0))
    return np.float32(mean), np.float32(1.0 if is_zero(std, mean) else std)
