"""Logprobs of sampled tokens: under the target policy, and as the engine's sampler processes them.

vLLM's `processed_logprobs` are a log-softmax after temperature, then min-p, then top-k and top-p, in this order
(vllm/v1/sample/sampler.py of 0.32). Greedy rows (temperature below 1e-5) count as temperature 1 there, with nothing cut
off. Shapes: K sampled tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Each token's sampling parameters: [K] each."""

    temperature_K: Tensor
    top_p_K: Tensor
    top_k_K: Tensor  # 0: off
    min_p_K: Tensor


def at_temperature(logits_KV: Tensor, sampling: SamplingTensors) -> Tensor:
    """Logits over each token's temperature: [K, V]."""
    temperature_K = sampling.temperature_K
    return logits_KV / torch.where(temperature_K < GREEDY_BELOW, 1.0, temperature_K).unsqueeze(-1)


def token_logprobs(logits_KV: Tensor, actions_K: Tensor) -> Tensor:
    """log softmax at the sampled tokens: [K]."""
    chosen_K = logits_KV.gather(-1, actions_K.unsqueeze(-1)).squeeze(-1)
    return chosen_K - torch.logsumexp(logits_KV, dim=-1)


def entropy(logits_KV: Tensor) -> Tensor:
    """Entropy of each distribution, nats: [K]."""
    logprobs_KV = torch.log_softmax(logits_KV, dim=-1)
    return -(logprobs_KV.exp() * logprobs_KV).sum(-1)


def processed_logprobs(scaled_KV: Tensor, actions_K: Tensor, sampling: SamplingTensors) -> Tensor:
    """What the engine's sampler reports for the sampled tokens: [K]; -inf where it could not have sampled them.

    scaled_KV: logits over temperature, from `at_temperature`.
    """
    random_K = sampling.temperature_K >= GREEDY_BELOW
    cuts_K = random_K & ((sampling.top_p_K < 1) | (sampling.top_k_K > 0) | (sampling.min_p_K > 0))
    result_K = token_logprobs(scaled_KV, actions_K)
    if cuts_K.any():
        part = SamplingTensors(
            *(t[cuts_K] for t in (sampling.temperature_K, sampling.top_p_K, sampling.top_k_K, sampling.min_p_K))
        )
        result_K = result_K.masked_scatter(cuts_K, token_logprobs(truncate(scaled_KV[cuts_K], part), actions_K[cuts_K]))
    return result_K


def truncate(scaled_KV: Tensor, sampling: SamplingTensors) -> Tensor:
    """Logits with min-p, top-k and top-p cut off: [K, V], -inf where cut."""
    probs_KV = torch.softmax(scaled_KV, dim=-1)
    floor_K1 = sampling.min_p_K.unsqueeze(-1) * probs_KV.amax(dim=-1, keepdim=True)
    logits_KV = scaled_KV.masked_fill(probs_KV < floor_K1, -torch.inf)
    vocabulary = logits_KV.shape[-1]
    sorted_KV, order_KV = logits_KV.sort(dim=-1)
    k_K = torch.where(sampling.top_k_K > 0, sampling.top_k_K, vocabulary).clamp(max=vocabulary).long()
    smallest_K1 = sorted_KV.gather(-1, (vocabulary - k_K).unsqueeze(-1))
    sorted_KV = sorted_KV.masked_fill(sorted_KV < smallest_K1, -torch.inf)
    cumulative_KV = torch.softmax(sorted_KV, dim=-1).cumsum(dim=-1)
    out_KV = cumulative_KV <= 1 - sampling.top_p_K.unsqueeze(-1)
    out_KV[:, -1] = False  # one always stays
    sorted_KV = sorted_KV.masked_fill(out_KV, -torch.inf)
    return torch.empty_like(sorted_KV).scatter_(-1, order_KV, sorted_KV)
