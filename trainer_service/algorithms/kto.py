"""Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306): learns from ratings alone.

    r(x, y) = log π_θ(y|x) / π_ref(y|x)                                 a sum over the tokens of the reply; eq. 7
    z       = max( 0, mean over i of log π(y_j|x_i) / π_ref(y_j|x_i) )       j: another sequence than i; section 4.1
    v(x, y) = σ( β (r − z) )  if rated up,   σ( β (z − r) )  if rated down                                     eq. 8
    loss    = E[ λ_y (1 − v(x, y)) ]

Departures:
1. z is one number for the whole batch, from the policy at its start. That of a micro-batch would be noise.
2. λ balances ups and downs (section 4.2), by the counts of this batch and of up to WINDOW earlier ratings.
3. A down is also weighted by min(1, π_prox(y|x) / π_behaviour(y|x)), π_prox: policy at the start of the batch,
   π_behaviour: the sampling policy. A reply unlearned since is not pushed further (Le Roux et al. 2025, TOPR).
4. A token that has moved beyond `clip` within the batch, in the direction of its rating, has no gradient: without a
   bound, tokens that bad replies share with good ones would be unlearned with them.

log π is at the temperature that the reply was sampled with. E is the mean over the rated sequences of the minibatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shared.config import KTOConfig
from trainer_service.algorithms.seam import (
    Batch,
    Constants,
    Figures,
    Memory,
    Needs,
    Now,
    Precomputed,
    Said,
    Unit,
    one_each,
    pick,
)
from trainer_service.algorithms.surrogates import drift_of, held

WINDOW = 1024  # number of earlier ratings in the balance of ups and downs


@dataclass(frozen=True, slots=True)
class KTO:
    config: KTOConfig

    @property
    def needs(self) -> Needs:
        return Needs.PROXIMAL | Needs.REFERENCE

    def units(self, batch: Batch) -> list[Unit]:
        """The rated sequences; then as many mismatched ones, which are only scored; none if one sequence is rated."""
        rated = sorted(batch.ratings)
        neighbours = zip(rated, rated[1:] + rated[:1], strict=True)
        mismatched = [_answer_of_another(batch, place, other) for place, other in neighbours if place != other]
        return [*one_each(rated, Said.RATING), *(Unit((place,), trained=False) for place in mismatched)]

    def constants(
        self, batch: Batch, units: list[Unit], precomputed: Precomputed, memory: Memory
    ) -> tuple[Constants, Figures]:
        proximal, scored = pick(precomputed.proximal, units), (precomputed.proximal, precomputed.reference)
        policy, reference = ([one.sum(dtype=np.float64) for one in pick(logprobs, units)] for logprobs in scored)
        gained = [p - r for p, r in zip(policy, reference, strict=True)]
        gaps = [gap for gap, unit in zip(gained, units, strict=True) if not unit.trained]
        kl = max(0.0, float(np.mean(gaps or [0.0])))
        ups = [float(batch.ratings.get(unit.members[0], False)) for unit in units]
        weights = _balance(memory, sum(ups), len(batch.ratings) - sum(ups), self.config.largest_weight)
        drifts = drift_of(batch, units, precomputed) if self.config.taper else [np.zeros(1, np.float32)] * len(units)
        tapers = [1.0 if up else math.exp(min(0.0, one.sum())) for up, one in zip(ups, drifts, strict=True)]
        steep = [1 - math.tanh(self.config.beta * (gap - kl) / 2) ** 2 for gap in gained]  # 4 σ(m) (1 − σ(m))
        constants: Constants = {
            "proximal": proximal,
            "reference": [np.full(1, one, np.float32) for one in reference],
            "kl": [np.full(1, kl, np.float32)] * len(units),
            "sign": [np.full(1, 1.0 if up else -1.0, np.float32) for up in ups],
            "weights": [np.full(1, weights[bool(up)] * one, np.float32) for up, one in zip(ups, tapers, strict=True)],
            "slopes": [np.full_like(one, slope) for one, slope in zip(proximal, steep, strict=True)],
        }
        return constants, {"kl": kl, "rated": float(len(batch.ratings)), "up_share": sum(ups) / len(batch.ratings)}

    def size(self, units: list[Unit], constants: Constants) -> float:
        return float(len(units))

    def loss(self, now: Now, constants: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs_K, held_K = held(now, constants, constants["sign"], self.config.clip)
        gained_S = now.sum_S(logprobs_K) - constants["reference"] - constants["kl"]
        margin_S = self.config.beta * constants["sign"] * gained_S
        loss = (constants["weights"] * (1 - torch.sigmoid(margin_S))).sum()
        share_S = now.sum_S(held_K.float()) / now.sum_S(torch.ones_like(logprobs_K))
        sums = {"rating_loss": loss.detach(), "accuracy": (margin_S.detach() > 0).sum(), "clip_fraction": share_S.sum()}
        return loss, sums


def _answer_of_another(batch: Batch, place: int, other: int) -> int:
    """Add a sequence with the prompt of one sequence and the answer to another's prompt. Returns its place.

    It is at most as long as the longest sequence of the batch, so that it fits the model's context: the start of the
    prompt is cut off.
    """
    prompt, answer = batch.sequences[place], batch.sequences[other]
    begin = int(answer.actions[0])
    room = max(len(one.token_ids) for one in batch.sequences) - (len(answer.token_ids) - begin)
    prompt_ids = prompt.token_ids[: prompt.actions[0]][-room:]
    moved = len(prompt_ids) - begin
    ids = np.concatenate([prompt_ids, answer.token_ids[begin:]])
    return batch.add(replace(answer, token_ids=ids, actions=answer.actions + moved, starts=answer.starts + moved))


def _balance(memory: Memory, ups: float, downs: float, largest: float) -> dict[bool, float]:
    """Return λ by rating: 1 for the more frequent one; the other gets the ratio of the counts. Changes `memory`."""
    earlier = memory.get("ups", 0.0) + memory.get("downs", 0.0)
    kept = min(1.0, WINDOW / earlier) if earlier else 0.0
    ups, downs = ups + kept * memory.get("ups", 0.0), downs + kept * memory.get("downs", 0.0)
    memory.update(ups=ups, downs=downs)
    times = downs / ups if ups else math.inf  # so that both weigh the same
    return {True: min(max(times, 1.0), largest), False: min(max(1 / times if times else math.inf, 1.0), largest)}
