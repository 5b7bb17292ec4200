"""Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290).

    Δ    = log π_θ(y_w|x)/π_ref(y_w|x) − log π_θ(y_l|x)/π_ref(y_l|x)          sums over the tokens of whole replies
    loss = −E[ (1−ε) log σ(β Δ) + ε log σ(−β Δ) ]                          eq. 7; ε: label smoothing, section 3 of
                                                        Mitchell 2023, "A note on DPO with noisy preferences"

y_w is preferred over y_l by a signal, or y_w is the correction of y_l, or, if configured, y_w is the best and y_l the
worst run of a task with the same first prompt. The last is Song et al. 2024 ("Trial and Error", arXiv 2403.02502): in a
run of several turns, only sampled tokens count, not tool results.

Departure: a token that has moved beyond `clip` within the batch, up in y_w or down in y_l, has no gradient: without a
bound, tokens that bad replies share with good ones would be unlearned with them.

log π is at the temperature that the reply was sampled with. E is the mean over the preferences of the minibatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.config import DPOConfig
from trainer_service.algorithms.seam import Batch, Constants, Figures, Memory, Needs, Now, Precomputed, Said, Unit, pick
from trainer_service.algorithms.surrogates import held


@dataclass(frozen=True, slots=True)
class DPO:
    config: DPOConfig

    @property
    def needs(self) -> Needs:
        return Needs.REFERENCE | (Needs.PROXIMAL if self.config.clip else Needs.NOTHING)

    def units(self, batch: Batch) -> list[Unit]:
        """One unit for each preference: the preferred sequence, then the other."""
        stated = list(dict.fromkeys(batch.pairs))
        known = {frozenset(pair) for pair in stated}
        compared = _best_over_worst(batch) if self.config.best_over_worst else ()
        return [
            *(Unit(pair, said=Said.PREFERENCE) for pair in stated),
            *(Unit(pair, said=Said.SCORE) for pair in compared if frozenset(pair) not in known),
        ]

    def constants(
        self, batch: Batch, units: list[Unit], precomputed: Precomputed, memory: Memory
    ) -> tuple[Constants, Figures]:
        sums = [
            np.full(1, logprobs.sum(dtype=np.float64), np.float32) for logprobs in pick(precomputed.reference, units)
        ]
        constants: Constants = {"reference": sums, "weights": [np.ones(1, np.float32)] * len(sums)}
        if self.config.clip:
            constants["proximal"] = pick(precomputed.proximal, units)
        lengths = [len(sequence.actions) for sequence in pick(batch.sequences, units)]
        constants["slopes"] = [
            np.full(n, one, np.float32) for n, one in zip(lengths, self._slopes(constants), strict=True)
        ]
        return constants, {"preferences": float(len(units))}

    def _slopes(self, constants: Constants) -> list[float]:
        """Return |σ(−β Δ) − ε| of each member at the start of the batch; without `clip`, π is unknown and Δ is 0."""
        policy = constants.get("proximal", constants["reference"])
        gained = [float(p.sum(dtype=np.float64) - r[0]) for p, r in zip(policy, constants["reference"], strict=True)]
        margins = [
            self.config.beta * (better - worse) for better, worse in zip(gained[0::2], gained[1::2], strict=True)
        ]
        slopes = (abs(0.5 - 0.5 * math.tanh(margin / 2) - self.config.label_smoothing) for margin in margins)
        return [slope for slope in slopes for _ in range(2)]

    def size(self, units: list[Unit], constants: Constants) -> float:
        return float(len(units))

    def loss(self, now: Now, constants: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        smoothing = self.config.label_smoothing
        logprobs_K = now.logprobs_K
        if self.config.clip:
            sign_S = torch.ones_like(constants["reference"])
            sign_S[1::2] = -1
            logprobs_K, _ = held(now, constants, sign_S, self.config.clip)
        gained_S = now.sum_S(logprobs_K) - constants["reference"]
        margin_P = self.config.beta * (gained_S[0::2] - gained_S[1::2])
        logsigmoid = torch.nn.functional.logsigmoid
        of_P = (1 - smoothing) * logsigmoid(margin_P) + smoothing * logsigmoid(-margin_P)
        loss = -(constants["weights"][0::2] * of_P).sum()
        with torch.no_grad():
            sums = {"preference_loss": loss.detach(), "margin": margin_P.sum(), "accuracy": (margin_P > 0).sum()}
        return loss, sums


def _best_over_worst(batch: Batch) -> list[tuple[int, int]]:
    """For each task (with its group of keys) and prompt, return the runs of highest and lowest return, unless equal.

    A run whose turns did not merge into one sequence is left out.
    """
    runs: dict[tuple[str | None, str, bytes], list[tuple[float, int]]] = {}
    for trajectory, places in zip(batch.trajectories, batch.members, strict=True):
        rewards = [r for r in (trajectory.outcome, *trajectory.turn_rewards) if r is not None]
        if trajectory.task_id is not None and rewards and len(places) == 1:
            sequence = batch.sequences[places[0]]
            prompt = sequence.token_ids[: sequence.actions[0]].tobytes()
            key = trajectory.key_group, trajectory.task_id, prompt
            runs.setdefault(key, []).append((sum(rewards), places[0]))
    ends = [(max(found), min(found)) for found in runs.values()]
    return [(best[1], worst[1]) for best, worst in ends if best[0] > worst[0]]
