"""Proximal policy optimization with a critic (Schulman et al. 2017, "Proximal Policy Optimization Algorithms").

    r_t(θ) = π_θ(a_t|s_t) / π_prox(a_t|s_t)
    L_CLIP = E[ w_t · min( r_t Â_t, clip(r_t, 1−ε, 1+ε) Â_t ) ]                                      eq. 7
    L_V    = E[ ½ max( (V−R)², (V_old + clip(V−V_old, −ε_v, ε_v) − R)² ) ]           value clipping, as in its code
    loss   = −L_CLIP + c_v L_V − c_e H[π_θ]                                                           eq. 9

Departures, each with its source:
1. π_prox is the policy at the start of the batch, not the one that sampled: the decoupled objective of Hilton et al.
   2022 ("Batch size-invariance for policy optimization", eq. 3). What lies between the two is corrected by
   w_t = min(π_prox/π_behaviour, cap), a truncated importance weight (Ionides 2008), constant for the gradient.
   Both of its terms are as the sampler processed them (temperature, top-k, top-p, min-p).
2. The reward carries a KL penalty towards the base model for each token (Ziegler et al. 2019, eq. 2):
   r_t = reward at the end of a reply − β (log π_prox(a_t|s_t) − log π_ref(a_t|s_t)).
3. Advantages come from GAE and are whitened over the batch.

E is the mean over all sampled tokens of the minibatch. Shapes: K tokens, V vocabulary; A actions of one trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.config import PPOConfig
from trainer_service.algorithms.advantages import Floats, gae, whiten


@dataclass(frozen=True, slots=True)
class Estimates:
    """What is known of a batch before its first step: one array [A] for each trajectory."""

    advantages: list[Floats]
    returns: list[Floats]
    kl_to_reference: float  # mean of log π_prox − log π_ref over all tokens, nats


@dataclass(frozen=True, slots=True)
class Targets:
    """The constants of the loss for the K tokens of a micro-batch: [K] each."""

    proximal_K: Tensor  # log π_prox
    weights_K: Tensor  # w_t
    advantages_K: Tensor
    returns_K: Tensor
    old_values_K: Tensor


def estimate(
    rewards: list[Floats], proximal: list[Floats], reference: list[Floats], values: list[Floats], config: PPOConfig
) -> Estimates:
    """Advantages and returns of every trajectory; each argument is one array [A] for each."""
    shaped = [r - np.float32(config.kl_coef) * (p - q) for r, p, q in zip(rewards, proximal, reference, strict=True)]
    pairs = [gae(r, v, config.gamma, config.lam) for r, v in zip(shaped, values, strict=True)]
    advantages = [advantage for advantage, _ in pairs]
    gaps = np.concatenate([p - q for p, q in zip(proximal, reference, strict=True)])
    return Estimates(
        advantages=whiten(advantages) if config.normalize_advantages else advantages,
        returns=[returns for _, returns in pairs],
        kl_to_reference=float(gaps.mean()),
    )


def importance_weights(proximal_processed: Floats, behaviour: Floats, cap: float) -> Floats:
    """w_t = min(π_prox/π_behaviour, cap), both as the sampler processed them; 0 where π_prox could not sample."""
    weights: Floats = np.minimum(np.exp(proximal_processed - behaviour), np.float32(cap)).astype(np.float32)
    return weights


def loss(
    logprobs_K: Tensor, entropy_K: Tensor, values_K: Tensor, targets: Targets, config: PPOConfig, tokens: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's share of the minibatch's loss.

    tokens: sampled tokens of the whole minibatch; shares of all its micro-batches add up to the mean.
    Returns: the loss, and sums over tokens of what is worth plotting.
    """
    log_ratio_K = logprobs_K - targets.proximal_K
    ratio_K = log_ratio_K.exp()
    clipped_K = ratio_K.clamp(1 - config.clip, 1 + config.clip)
    surrogate_K = torch.minimum(ratio_K * targets.advantages_K, clipped_K * targets.advantages_K)
    policy_loss = -(targets.weights_K * surrogate_K).sum()
    error_K = (values_K - targets.returns_K).square()
    if config.value_clip > 0:
        moved_K = (values_K - targets.old_values_K).clamp(-config.value_clip, config.value_clip)
        error_K = torch.maximum(error_K, (targets.old_values_K + moved_K - targets.returns_K).square())
    value_loss = 0.5 * error_K.sum()
    total = (policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy_K.sum()) / tokens
    with torch.no_grad():
        sums = {
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy_K.sum(),
            "clip_fraction": ((ratio_K - 1).abs() > config.clip).sum(),
            "approx_kl": ((ratio_K - 1) - log_ratio_K).sum(),  # k3 of Schulman's note "Approximating KL Divergence"
        }
    return total, sums
