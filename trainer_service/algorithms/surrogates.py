"""Surrogate objectives, which turn an advantage into a loss of the trained policy, and importance weights.

With r_t(θ) = π_θ(a_t|s_t) / π_prox(a_t|s_t), of each token, to be maximized; [·] is constant for the gradient:

    clip    J_t = min( r_t Â_t, clip(r_t, 1−ε_low, 1+ε_high) Â_t )             PPO (Schulman et al. 2017, eq. 7)
    cispo   J_t = [ min(r_t, 1+ε_high) ] Â_t log π_θ                           MiniMax-M1 (2025, arXiv 2506.13585)
    gspo    clip, with r_t = [ (Π_i r_i)^(1/n) ] π_θ/[π_θ]                     GSPO-token (2025, arXiv 2507.18071)
    topr    J_t = [ min(Π_i π_θ/π_behaviour, 1) ] Â_t log π_θ   if Â_t < 0     tapered REINFORCE (Le Roux et al. 2025,
            J_t = Â_t log π_θ                                   otherwise      arXiv 2503.14286)
    opmd    J_t = [ Â_t − τ Σ_i log r_i ] log π_θ                              mirror descent (Kimi k1.5, 2025, arXiv
                                                                               2501.12599)

i runs over the n tokens of the sequence; the second term of opmd is the gradient of −τ/2 (Σ_i log r_i)². `clip` has two
refinements: ε_high above ε_low allows unlikely tokens to become likely (Yu et al. 2025, "DAPO", section 3.1); and where
Â_t < 0, J_t is at least c Â_t (Ye et al. 2020, "Mastering Complex Control in MOBA Games").

π_prox is the policy at the start of the batch, not the one that sampled: the decoupled objective of Hilton et al. 2022
("Batch size-invariance for policy optimization", eq. 3). A weight w_t, constant for the gradient, corrects the
difference: each token's ratio π_prox/π_behaviour, or its product over the sequence. It is truncated to [floor, cap]
(Ionides 2008), or set to 0 outside that range ("IcePop", arXiv 2510.18855). Both policies of the ratio are as the
sampler processed them (temperature, top-k, top-p, min-p). `topr` has its own correction; with it w_t is 0 or 1.

Shapes: K tokens of a micro-batch, S sequences of it, A actions of one sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from shared.config import SurrogateConfig
from trainer_service.algorithms.seam import (
    Batch,
    Constants,
    Figures,
    Floats,
    Needs,
    Now,
    Precomputed,
    Said,
    Unit,
    one_each,
    pick,
)

C = TypeVar("C", bound=SurrogateConfig)

_LEAST_TAIL = 1e-6  # float32 has no smaller remainder of 1
LARGEST_LOG_RATIO = 20.0  # nats: far outside any clip range, and float32 can still store the square of a sum of e^20


def clipped(
    log_ratio_K: Tensor, advantages_K: Tensor, *, low: float, high: float, dual: float | None
) -> tuple[Tensor, Tensor]:
    """Return J_t of PPO, and which ratios are outside the clip range. dual: c, above 1; None: no bound."""
    ratio_K = log_ratio_K.exp()
    surrogate_K = torch.minimum(ratio_K * advantages_K, ratio_K.clamp(1 - low, 1 + high) * advantages_K)
    if dual is not None:
        surrogate_K = torch.where(advantages_K < 0, torch.maximum(surrogate_K, dual * advantages_K), surrogate_K)
    return surrogate_K, (ratio_K < 1 - low) | (ratio_K > 1 + high)


def surrogate(
    now: Now, log_ratio_K: Tensor, constants: dict[str, Tensor], config: SurrogateConfig
) -> tuple[Tensor, Tensor]:
    """Return J_t of each token by the configured surrogate, and which tokens it bounds: [K]. log_ratio: log r_t."""
    advantages_K, moved_K = constants["advantages"], log_ratio_K.detach()
    low, high, dual = config.clip, config.clip_high or config.clip, config.dual_clip
    if config.surrogate == "clip":
        return clipped(log_ratio_K, advantages_K, low=low, high=high, dual=dual)
    if config.surrogate == "gspo":
        mean_S = now.sum_S(moved_K) / now.sum_S(torch.ones_like(moved_K))
        level_K = mean_S[now.sequence_K] + (now.logprobs_K - now.logprobs_K.detach())
        return clipped(level_K, advantages_K, low=low, high=high, dual=dual)
    if config.surrogate == "cispo":
        ratio_K = moved_K.exp()
        return ratio_K.clamp(max=1 + high) * advantages_K * now.logprobs_K, ratio_K > 1 + high
    if config.surrogate == "topr":
        taper_S = now.sum_S(moved_K + constants["drift"]).clamp(max=0).exp()
        tapered_K = (advantages_K < 0) & (taper_S < 1)[now.sequence_K]
        weight_K = torch.where(tapered_K, taper_S[now.sequence_K], 1.0)
        return weight_K * advantages_K * now.logprobs_K, tapered_K
    moved_S = now.sum_S(moved_K).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    pull_K = advantages_K - config.mirror_coef * moved_S[now.sequence_K]
    return pull_K * now.logprobs_K, torch.zeros_like(moved_K)


def divergence(gap: Tensor, estimator: str) -> Tensor:
    """Estimate KL(π‖π_ref) at tokens that π sampled; gap: log π − log π_ref (Schulman 2020, "Approximating KL")."""
    if estimator == "k1":
        return gap
    return 0.5 * gap.square() if estimator == "k2" else (-gap).clamp(max=LARGEST_LOG_RATIO).exp() - 1 + gap


def divergence_with_tail(teacher_KN: Tensor, policy_KN: Tensor) -> Tensor:
    """Return KL(teacher‖policy) over N tokens, and all others as one class: [K]. Arguments: log-probabilities."""
    tails = [torch.log1p(-one.exp().sum(-1).clamp(max=1 - _LEAST_TAIL)) for one in (teacher_KN, policy_KN)]
    inside_K = (teacher_KN.exp() * (teacher_KN - policy_KN)).sum(-1)
    return inside_K + tails[0].exp() * (tails[0] - tails[1])


def importance_weights(log_ratio_A: Floats, config: SurrogateConfig) -> Floats:
    """Return w_t: [A]; 0 where a mask excludes the token or, with a floor of 0, where π_prox could not sample it.

    log_ratio_A: [A] log π_prox/π_behaviour, both as the sampler processed them.
    """
    levels = log_ratio_A if config.importance == "token" else np.full_like(log_ratio_A, log_ratio_A.sum())
    ratios = np.exp(np.minimum(levels, np.float32(LARGEST_LOG_RATIO)))  # float32 overflows at e^89
    low, high = np.float32(config.importance_floor), np.float32(config.importance_cap)
    kept = np.full(len(ratios), True)
    if config.importance_outside == "mask":
        kept &= (ratios >= low) & (ratios <= high)
    if config.geometric_mask is not None:
        least, most = config.geometric_mask
        kept &= bool(least <= np.exp(min(float(log_ratio_A.mean()), LARGEST_LOG_RATIO)) <= most)
    if config.surrogate == "topr":
        return kept.astype(np.float32)
    return np.where(kept, ratios.clip(low, high), np.float32(0)).astype(np.float32)


def policy_needs(config: SurrogateConfig) -> Needs:
    """Return the needs of `policy_constants` and `policy_loss`."""
    reference = Needs.REFERENCE if config.kl_coef else Needs.NOTHING
    return Needs.PROXIMAL | reference | (Needs.ENTROPY if config.entropy_coef else Needs.NOTHING)


def drift_of(batch: Batch, units: list[Unit], precomputed: Precomputed) -> list[Floats]:
    """Return log π_prox/π_behaviour of the units' sequences, [A] each, both as the sampler processed them.

    It is 0 where the sampler masked tokens, by a grammar or a bias: the set of allowed tokens is unknown.
    If top-p, top-k or min-p cuts off a token under π_prox, its log π_prox before the cut is used: that is close if
    rounding at the edge decided, and low if the policy has moved away.
    """
    now = zip(pick(precomputed.processed, units), pick(precomputed.proximal, units), strict=True)
    known = [np.where(np.isneginf(cut), uncut, cut) for cut, uncut in now]
    return [
        np.where(sequence.masked, np.float32(0), one - sequence.behaviour)
        for one, sequence in zip(known, pick(batch.sequences, units), strict=True)
    ]


def policy_constants(
    batch: Batch, units: list[Unit], precomputed: Precomputed, config: SurrogateConfig
) -> tuple[Constants, Figures]:
    """Return the constants of `policy_loss` except advantages: log π_prox, w_t and others. And figures to plot."""
    proximal, drift = pick(precomputed.proximal, units), drift_of(batch, units, precomputed)
    constants = {"proximal": proximal, "weights": [importance_weights(one, config) for one in drift]}
    figures = _drift_figures(drift, constants["weights"])
    if config.surrogate == "topr":
        constants["drift"] = drift
    if config.mean != "tokens":
        whole = {"sequences": 0, "constant": config.mean_tokens}[config.mean]
        constants["shares"] = [np.full(len(one), 1 / (whole or len(one)), np.float32) for one in proximal]
    if config.kl_coef:
        reference = pick(precomputed.reference, units)
        gaps = np.concatenate([p - q for p, q in zip(proximal, reference, strict=True)])
        figures["kl_to_reference"] = float(gaps.mean())
        if config.kl_in == "loss":
            constants["reference"] = reference
    return constants, figures


def _drift_figures(drift: list[Floats], weights: list[Floats]) -> Figures:
    """Measure the distance of the samplers' policies from π_prox, by the untruncated ratios of all tokens.

    effective_sample_size: (Σ ρ)² / (n Σ ρ²), as a share of n: the number of π_prox's own tokens that would be worth as
    much (Kong 1992). kl_to_sampler: KL(π_behaviour‖π_prox) per token.
    """
    flat, weight = np.concatenate(drift), np.concatenate(weights)
    log_ratio = flat.astype(np.float64).clip(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    ratio = np.exp(log_ratio)
    return {
        "importance_weight": float(weight.mean()),
        "masked_fraction": float((weight == 0).mean()),
        "effective_sample_size": float(ratio.mean() ** 2 / (ratio**2).mean()),
        "kl_to_sampler": float((ratio - 1 - log_ratio).mean()),
    }


def held(now: Now, constants: dict[str, Tensor], sign_S: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return log π of each action, without a gradient if it has moved beyond `clip` within the batch in the direction
    of its sequence's sign; and which actions these are: [K], [K]. The probability has then risen to more than 1 + ε
    times its initial value, or fallen below 1 / (1 + ε) of it. A clip of 0 sets no bound."""
    moved_K = sign_S[now.sequence_K] * (now.logprobs_K.detach() - constants["proximal"])
    held_K = moved_K > (math.log1p(clip) if clip else math.inf)
    return torch.where(held_K, now.logprobs_K.detach(), now.logprobs_K), held_K


def policy_size(constants: Constants, config: SurrogateConfig) -> float:
    """Return the divisor of `policy_loss`: the number of tokens, or of sequences."""
    return float(sum(map(len, constants["proximal"])) if config.mean == "tokens" else len(constants["proximal"]))


def total(x_K: Tensor, constants: dict[str, Tensor]) -> Tensor:
    """Sum over tokens, each with its share in a mean over sequences if that is configured."""
    return (x_K * constants["shares"]).sum() if "shares" in constants else x_K.sum()


def policy_loss(now: Now, constants: dict[str, Tensor], config: SurrogateConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return −Σ w_t J_t − c_e Σ H, plus β Σ KL if it is in the loss, over the micro-batch; and sums to plot."""
    log_ratio_K = (now.logprobs_K - constants["proximal"]).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    surrogate_K, bounded_K = surrogate(now, log_ratio_K, constants, config)
    loss = -total(constants["weights"] * surrogate_K, constants)
    objective = loss - config.entropy_coef * total(now.entropy_K, constants)
    if "reference" in constants:
        gap_K = now.logprobs_K - constants["reference"]
        objective = objective + config.kl_coef * total(divergence(gap_K, config.kl), constants)
    with torch.no_grad():
        sums = {
            "clip_fraction": _reported_sum(bounded_K, now, config),
            "approx_kl": _reported_sum(divergence(-log_ratio_K, "k3"), now, config),
            "policy_loss": loss.detach(),
            "entropy": _reported_sum(now.entropy_K, now, config),
        }
    return objective, sums


def _reported_sum(x_K: Tensor, now: Now, config: SurrogateConfig) -> Tensor:
    """Return a sum that, divided by the size, gives the mean of x over tokens, or over the means of sequences."""
    if config.mean == "tokens":
        return x_K.sum()
    return (now.sum_S(x_K.to(now.logprobs_K)) / now.sum_S(torch.ones_like(now.logprobs_K))).sum()


@dataclass(frozen=True, slots=True)
class PolicyGradient(Generic[C]):
    """The common parts of algorithms that learn from rewards by one of these surrogates: all but the advantages."""

    config: C

    @property
    def needs(self) -> Needs:
        return policy_needs(self.config)

    def units(self, batch: Batch) -> list[Unit]:
        return one_each(batch.rewarded, Said.SCORE)

    def size(self, units: list[Unit], constants: Constants) -> float:
        return policy_size(constants, self.config)

    def loss(self, now: Now, constants: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return policy_loss(now, constants, self.config)


class PartialPolicyGradient(PolicyGradient[C]):
    """The same for some tokens only: those where the constant `counts` is not 0."""

    def size(self, units: list[Unit], constants: Constants) -> float:
        return float(sum(map(np.sum, constants["counts"])))

    def loss(self, now: Now, constants: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        counts_K = constants["counts"] > 0
        return policy_loss(now.only(counts_K), {name: x_K[counts_K] for name, x_K in constants.items()}, self.config)
