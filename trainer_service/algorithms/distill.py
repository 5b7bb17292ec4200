"""Distillation: another model scores the policy's own samples, token by token.

    Â_t  = clip( log π_T(y_t|x, y_<t) − log π_prox(y_t|x, y_<t), −c, c ) − β (log π_prox − log π_ref)
    loss = −E[ w_t · J_t ] − c_e H[π_θ]                        J_t: PPO's clipped objective; it and w_t: surrogates.py

π_T is the teacher: a model in a folder, or behind an endpoint. With samples of π_prox the gradient is that of the
reverse KL divergence KL(π ‖ π_T) (Agarwal et al. 2024, "On-Policy Distillation of Language Models", arXiv 2306.13649;
Gu et al. 2024, "MiniLLM", arXiv 2306.08543).

Departures, each with its reason:
1. A token's advantage excludes the divergence of later tokens: with one sample per prompt, that is mostly noise.
2. The difference is clipped, so that no single token outweighs all others.
3. A teacher behind an endpoint scores at temperature 1, whatever the sampling temperature was: samples then become like
   the teacher at that temperature. A teacher in a folder scores at the sampling temperature.

E is the mean over the sampled tokens of the minibatch that the teacher scored. The policy did not sample those of
demonstrations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from shared.config import DistillConfig
from trainer_service.algorithms.advantages import kl_penalties
from trainer_service.algorithms.seam import (
    Batch,
    Constants,
    Figures,
    Flags,
    Ints,
    Memory,
    Needs,
    Precomputed,
    Unit,
    one_each,
)
from trainer_service.algorithms.surrogates import PartialPolicyGradient, policy_constants, policy_needs


class Distill(PartialPolicyGradient[DistillConfig]):
    @property
    def needs(self) -> Needs:
        return policy_needs(self.config) | (Needs.TEACHER if self.config.path else Needs.NOTHING)

    def units(self, batch: Batch) -> list[Unit]:
        scored = (place for places in batch.members for place in places) if self.config.path else batch.taught
        places = sorted(scored)
        return one_each(place for place, flags in zip(places, _sampled(batch, places), strict=True) if flags.any())

    def constants(
        self, batch: Batch, units: list[Unit], precomputed: Precomputed, memory: Memory
    ) -> tuple[Constants, Figures]:
        constants, figures = policy_constants(batch, units, precomputed, self.config)
        teacher = precomputed.teacher if self.config.path else [batch.taught[unit.members[0]] for unit in units]
        proximal, bound = constants["proximal"], self.config.advantage_bound
        gaps = [t - p for t, p in zip(teacher, proximal, strict=True)]
        sampled = _sampled(batch, (unit.members[0] for unit in units))
        # a gap is NaN where the teacher refused to score the row
        counted = [flags & ~np.isnan(gap) for flags, gap in zip(sampled, gaps, strict=True)]
        constants["counts"] = [flags.astype(np.float32) for flags in counted]
        constants["advantages"] = [np.nan_to_num(gap.clip(-bound, bound)) for gap in gaps]
        penalties = kl_penalties(units, precomputed, self.config)
        if penalties:
            constants["advantages"] = [a - p for a, p in zip(constants["advantages"], penalties, strict=True)]
        scored = np.concatenate(gaps)[np.concatenate(counted)]
        figures["kl_to_teacher"] = float(-scored.mean()) if len(scored) else 0.0
        return constants, figures


def _sampled(batch: Batch, places: Iterable[int]) -> Iterator[Flags]:
    """Yield which actions of each of these sequences the policy sampled, [A].

    The others are a turn's written answer: a demonstration, or a correction that repeats the reply.
    """
    written: dict[int, list[Ints]] = {}  # by row id
    for place in batch.written:
        written.setdefault(batch.sequences[place].row_ids[0], []).append(batch.sequences[place].token_actions)
    for place in places:
        sequence, begin = batch.sequences[place], 0
        flags = np.ones(len(sequence.actions), np.bool_)
        for row_id, end in zip(sequence.row_ids, sequence.ends, strict=True):
            reply = sequence.token_actions[begin : end + 1]
            flags[begin : end + 1] = not any(np.array_equal(answer, reply) for answer in written.get(row_id, ()))
            begin = end + 1
        yield flags
