"""SPO (Xu & Ding 2025, "Single-stream Policy Optimization", arXiv 2509.13232): single samples and a tracker.

    Â    = (R − v(x) − μ) / σ            R: return of an attempt; v(x): earlier scores of similar attempts
    loss = −E[ w_t · J_t ] − c_e H[π_θ]                        J_t: PPO's clipped objective; it and w_t: surrogates.py

Departures, each with its source or reason:
1. The paper stores a value for each prompt. Prompts in production do not repeat: v is an estimate for the task, shrunk
   towards the one for the system prompt, which is shrunk towards the one for all; see attempts.tracked.
2. Earlier scores lose weight with KL divergence, as in the paper, and with age. The divergence is between the samplers
   of a batch and the trainer's policy: it is known without another forward pass.
3. Unbounded rewards have a Gaussian tracker; bounded ones a Beta tracker, as in the paper.
4. While batches are small, μ and σ include earlier batches (running moments).
5. Prompts are not selected by difficulty: callers choose them.
"""

from __future__ import annotations

import numpy as np

from shared.config import SPOConfig
from trainer_service.algorithms.advantages import running_moments, standardize
from trainer_service.algorithms.attempts import attempts, spread, tracked
from trainer_service.algorithms.seam import Batch, Constants, Figures, Memory, Precomputed, Unit
from trainer_service.algorithms.surrogates import PolicyGradient, policy_constants


class SPO(PolicyGradient[SPOConfig]):
    def constants(
        self, batch: Batch, units: list[Unit], precomputed: Precomputed, memory: Memory
    ) -> tuple[Constants, Figures]:
        config = self.config
        constants, figures = policy_constants(batch, units, precomputed, config)
        found = attempts(batch, units, precomputed, config, memory, prompt_tokens=config.prompt_tokens)
        values = tracked(found, memory, figures["kl_to_sampler"], config)
        gains = [np.array([one.score - value], np.float32) for one, value in zip(found, values, strict=True)]
        mean, std = running_moments(memory, gains, config.baseline_sequences)
        advantages = [float(one[0]) for one in standardize(gains, mean, std)]
        constants["advantages"] = spread(found, advantages, constants["proximal"])
        return constants, figures | {"baseline": float(np.mean(values)), "tracked_keys": float(len(memory["seen"]))}
