"""The penalties of vLLM's sampler, recomputed from the token ids.

For a token v with n occurrences in the reply so far (vllm/model_executor/layers/utils.py of 0.32, apply_penalties):

    z_v ← z_v / ρ if z_v > 0, else z_v · ρ          if v is in the prompt or n > 0; ρ: repetition penalty
    z_v ← z_v − frequency · n − presence · [n > 0]

on the logits before the temperature τ. Here z is already divided by τ: ρ is not affected, the other terms are divided
by τ, too.
Shapes: K sampled tokens, V vocabulary, N tokens of all sequences, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from trainer_service.trajectories import SAMPLING, TokenSequence

_COLUMNS = [SAMPLING.index(name) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")]
_OFF = np.array([1, 0, 0], np.float32)


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalties of K sampled tokens, and the tokens before each: prompt and reply are ranges of tokens_N."""

    tokens_N: Tensor
    begins_K: Tensor  # start of its prompt
    starts_K: Tensor  # end of its prompt and start of its reply
    ends_K: Tensor  # its own position
    repetition_K: Tensor
    presence_K: Tensor
    frequency_K: Tensor

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence]) -> Penalties | None:
        """Return the penalties of these sequences' actions; None if no action has any."""
        values_K3 = np.concatenate([sequence.sampling[:, _COLUMNS] for sequence in sequences])
        if (values_K3 == _OFF).all():
            return None
        begins = np.cumsum([0] + [len(sequence.token_ids) for sequence in sequences[:-1]])
        pairs = list(zip(begins, sequences, strict=True))
        places = (
            np.concatenate([np.full(len(s.actions), begin, np.int64) for begin, s in pairs]),
            np.concatenate([begin + s.starts for begin, s in pairs]),
            np.concatenate([begin + s.actions for begin, s in pairs]),
        )
        tokens_N = np.concatenate([sequence.token_ids for sequence in sequences])
        arrays = (tokens_N, *places, *(values_K3[:, column].copy() for column in range(3)))
        return cls(*map(torch.from_numpy, arrays))

    def rows(self, chosen: Tensor | slice) -> Penalties:
        """Select some of the K tokens by a mask, their indices or a range."""
        names = [field.name for field in fields(self)]
        return Penalties(self.tokens_N, *(getattr(self, name)[chosen] for name in names[1:]))

    def to(self, device: torch.device) -> Penalties:
        """Return the same on a device."""
        return Penalties(*(getattr(self, field.name).to(device) for field in fields(self)))


def penalized(scaled_KV: Tensor, penalties: Penalties, temperature_K: Tensor) -> Tensor:
    """Return the logits after penalties, [K, V]. scaled_KV: logits divided by temperature_K."""
    counts_KV = torch.zeros_like(scaled_KV)
    _count(counts_KV, penalties.tokens_N, penalties.starts_K, penalties.ends_K)
    minus_KV = penalties.frequency_K[:, None] * counts_KV + penalties.presence_K[:, None] * (counts_KV > 0)
    _count(counts_KV, penalties.tokens_N, penalties.begins_K, penalties.starts_K)
    factor_KV = torch.where(counts_KV > 0, penalties.repetition_K[:, None], 1.0)
    repeated_KV = torch.where(scaled_KV > 0, scaled_KV / factor_KV, scaled_KV * factor_KV)
    return repeated_KV - minus_KV / temperature_K[:, None]


def _count(counts_KV: Tensor, tokens_N: Tensor, first_K: Tensor, last_K: Tensor) -> None:
    """Add the tokens of each row's range to its counts."""
    lengths_K = last_K - first_K
    rows = torch.repeat_interleave(lengths_K)
    before_K = lengths_K.cumsum(0) - lengths_K
    places = torch.arange(len(rows), device=rows.device) + (first_K - before_K)[rows]
    one = counts_KV.new_ones(()).expand(len(rows))
    counts_KV.index_put_((rows, tokens_N[places]), one, accumulate=True)
