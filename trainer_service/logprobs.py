"""Logprobs of sampled tokens: under the target policy, and as the engine's sampler processes them.

vLLM's `processed_logprobs` are a log-softmax after penalties, temperature, min-p, top-k and top-p, in this order
(vllm/v1/sample/sampler.py of 0.32). For greedy rows (temperature below 1e-5) they use temperature 1 without any cut.
Shapes: K sampled tokens, V vocabulary, N its most likely tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from trainer_service.penalties import Penalties, penalized

GREEDY_BELOW = 1e-5
LIKELIEST = 1024  # most likely tokens, among which top-k and top-p usually decide
SORTED_ROWS = 16  # full vocabularies sorted at once otherwise


class Scores(TypedDict, total=False):
    """A model's scores of the K sampled tokens of a packed row: [K] each, float32. Only requested ones are present."""

    logprobs: Tensor  # log π at the sampling temperature
    processed: Tensor  # log π as the engine's sampler processes it
    entropy: Tensor  # nats
    values: Tensor  # the critic's V before each token
    others: Tensor  # [K, N] log π of other tokens at the same positions
    top: tuple[Tensor, Tensor]  # [K, N] the most likely tokens and their log π


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of each token: [K] each."""

    temperature_K: Tensor
    top_p_K: Tensor
    top_k_K: Tensor  # 0: off
    min_p_K: Tensor
    penalties: Penalties | None = None  # None: no token has any

    def rows(self, chosen: Tensor | slice) -> SamplingTensors:
        """Select some tokens by a mask, their indices or a range."""
        return SamplingTensors(
            self.temperature_K[chosen],
            self.top_p_K[chosen],
            self.top_k_K[chosen],
            self.min_p_K[chosen],
            None if self.penalties is None else self.penalties.rows(chosen),
        )

    def to(self, device: torch.device) -> SamplingTensors:
        """Return the same on a device."""
        return SamplingTensors(
            self.temperature_K.to(device),
            self.top_p_K.to(device),
            self.top_k_K.to(device),
            self.min_p_K.to(device),
            None if self.penalties is None else self.penalties.to(device),
        )


def score(
    logits_KV: Tensor,
    actions_K: Tensor,
    sampling: SamplingTensors,
    *,
    processed: bool = False,
    entropies: bool = False,
    entropy_gradient: bool = False,
    others: Tensor | None = None,
    top: int = 0,
) -> Scores:
    """Return scores of the sampled tokens from their logits. entropy_gradient: entropies are trained, not only plotted.

    others: [K, N] further tokens to score. top: number of most likely tokens to return.
    """
    scaled_KV = at_temperature(logits_KV, sampling)
    scores: Scores = {"logprobs": token_logprobs(scaled_KV, actions_K)}
    if processed:
        scores["processed"] = processed_logprobs(scaled_KV, actions_K, sampling)
    if entropies:
        with torch.set_grad_enabled(entropy_gradient):
            scores["entropy"] = entropy(scaled_KV)
    if others is not None or top:
        logprobs_KV = torch.log_softmax(scaled_KV, -1)
        if others is not None:
            scores["others"] = logprobs_KV.gather(-1, others)
        if top:
            likeliest = logprobs_KV.detach().topk(min(top, logprobs_KV.shape[-1]), dim=-1)
            scores["top"] = likeliest.indices, likeliest.values
    return scores


def at_temperature(logits_KV: Tensor, sampling: SamplingTensors) -> Tensor:
    """Divide logits by each token's temperature: [K, V]."""
    return logits_KV / _divisor(sampling).unsqueeze(-1)


def _divisor(sampling: SamplingTensors) -> Tensor:
    """Return the sampler's divisor of logits: [K]."""
    return torch.where(sampling.temperature_K < GREEDY_BELOW, 1.0, sampling.temperature_K)


def token_logprobs(logits_KV: Tensor, actions_K: Tensor) -> Tensor:
    """Return log softmax at the sampled tokens: [K]."""
    chosen_K = logits_KV.gather(-1, actions_K.unsqueeze(-1)).squeeze(-1)
    return chosen_K - torch.logsumexp(logits_KV, dim=-1)


def entropy(logits_KV: Tensor) -> Tensor:
    """Return the entropy of each distribution in nats: [K]."""
    logprobs_KV = torch.log_softmax(logits_KV, dim=-1)
    return -(logprobs_KV.exp() * logprobs_KV).sum(-1)


def processed_logprobs(scaled_KV: Tensor, actions_K: Tensor, sampling: SamplingTensors) -> Tensor:
    """Return the logprobs that the engine's sampler reports: [K]; -inf where it could not have sampled the token.

    scaled_KV: logits divided by temperature, from `at_temperature`.
    """
    if sampling.penalties is not None:
        scaled_KV = penalized(scaled_KV, sampling.penalties, _divisor(sampling))
    result_K = token_logprobs(scaled_KV, actions_K)
    random_K = sampling.temperature_K >= GREEDY_BELOW
    ranked_K = random_K & ((sampling.top_p_K < 1) | (sampling.top_k_K > 0))
    floored_K = random_K & ~ranked_K & (sampling.min_p_K > 0)
    for cut_K, logprobs in ((floored_K, _above_floor), (ranked_K, _among_likeliest)):
        if cut_K.any():
            part = sampling.rows(cut_K)
            result_K = result_K.masked_scatter(cut_K, logprobs(scaled_KV[cut_K], actions_K[cut_K], part))
    return result_K


def _floor(scaled_KV: Tensor, sampling: SamplingTensors) -> Tensor:
    """Return the logit below which min-p cuts: [K, 1]."""
    return scaled_KV.amax(-1, keepdim=True) + sampling.min_p_K.log().unsqueeze(-1).to(scaled_KV.dtype)


def _above_floor(scaled_KV: Tensor, actions_K: Tensor, sampling: SamplingTensors) -> Tensor:
    return token_logprobs(scaled_KV.masked_fill(scaled_KV < _floor(scaled_KV, sampling), -torch.inf), actions_K)


def _among_likeliest(scaled_KV: Tensor, actions_K: Tensor, sampling: SamplingTensors) -> Tensor:
    """Return logprobs after min-p, top-k and top-p: from the most likely tokens if these decide, or else by a sort."""
    vocabulary = scaled_KV.shape[-1]
    top_KN, order_KN = scaled_KV.topk(min(LIKELIEST, vocabulary), dim=-1)
    floor_K1 = _floor(scaled_KV, sampling)
    k_K1 = torch.where(sampling.top_k_K > 0, sampling.top_k_K, vocabulary).clamp(max=top_KN.shape[-1]).long()[:, None]
    lowest_K1 = torch.maximum(floor_K1, top_KN.gather(-1, k_K1 - 1))
    in_top_k_K = (sampling.top_k_K > 0) & (top_KN[:, -1:] < lowest_K1).squeeze(-1)
    total_K = torch.logsumexp(scaled_KV.masked_fill(scaled_KV < floor_K1, -torch.inf), dim=-1)
    total_K = torch.where(in_top_k_K, _logsumexp(top_KN, top_KN >= lowest_K1), total_K)
    probs_KN = (top_KN - total_K.unsqueeze(-1)).exp().masked_fill(top_KN < lowest_K1, 0.0)
    inside_KN = (probs_KN.cumsum(-1) - probs_KN < sampling.top_p_K.unsqueeze(-1)) & (top_KN >= lowest_K1)
    inside_KN[:, 0] = True  # the most likely token is always kept
    decided_K = (~inside_KN[:, -1] & (in_top_k_K | (sampling.top_k_K == 0))) | (top_KN.shape[-1] == vocabulary)
    chosen_K = scaled_KV.gather(-1, actions_K.unsqueeze(-1)).squeeze(-1)
    sampled_K = (inside_KN & (order_KN == actions_K.unsqueeze(-1))).any(-1)
    result_K = torch.where(sampled_K, chosen_K - _logsumexp(top_KN, inside_KN), -torch.inf)
    for number in torch.split((~decided_K).nonzero().flatten(), SORTED_ROWS):
        logits_KV = truncate(scaled_KV[number], sampling.rows(number))
        result_K[number] = token_logprobs(logits_KV, actions_K[number])
    return result_K


def _logsumexp(logits_KN: Tensor, taken_KN: Tensor) -> Tensor:
    return logits_KN.masked_fill(~taken_KN, -torch.inf).logsumexp(-1)


def truncate(scaled_KV: Tensor, sampling: SamplingTensors) -> Tensor:
    """Return logits after min-p, top-k and top-p: [K, V], -inf where a token is cut off. Sorts whole vocabularies."""
    logits_KV = scaled_KV.masked_fill(scaled_KV < _floor(scaled_KV, sampling), -torch.inf)
    vocabulary = logits_KV.shape[-1]
    sorted_KV, order_KV = logits_KV.sort(dim=-1)
    k_K = torch.where(sampling.top_k_K > 0, sampling.top_k_K, vocabulary).clamp(max=vocabulary).long()
    smallest_K1 = sorted_KV.gather(-1, (vocabulary - k_K).unsqueeze(-1))
    sorted_KV = sorted_KV.masked_fill(sorted_KV < smallest_K1, -torch.inf)
    cumulative_KV = torch.softmax(sorted_KV, dim=-1).cumsum(dim=-1)
    out_KV = cumulative_KV <= 1 - sampling.top_p_K.unsqueeze(-1)
    out_KV[:, -1] = False  # the most likely token is always kept
    sorted_KV = sorted_KV.masked_fill(out_KV, -torch.inf)
    return logits_KV.scatter_(-1, order_KV, sorted_KV)
