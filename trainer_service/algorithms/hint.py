"""Words as a teacher: the policy with words about a reply in its prompt teaches the policy without them.

    Â_t  = clip( log π_T(y_t | h, x, y_<t) − log π_prox(y_t | x, y_<t), −c, c ) − β (log π_prox − log π_ref)
    loss = −E[ w_t · J_t ] − c_e H[π_θ]                        J_t: PPO's clipped objective; it and w_t: surrogates.py

h is a block of tokens with a comment, a correction or the user's next message, before all other tokens; x and y are the
turn's own prompt and reply. A token that the words make more likely is reinforced, and one that they make less likely
is weakened (SDPO: "Reinforcement Learning via Self-Distillation", arXiv 2601.20802; for the user's next message, arXiv
2603.12273; for demonstrations, SDFT, arXiv 2601.19897). With samples of π_prox this is the gradient of the reverse KL
divergence from the teacher.

With top_k, the default, a divergence over the teacher's k most likely tokens i and all others, ∅, replaces the
teacher's term in Â_t:

    loss = E[ m_t Σ_i p_i log(p_i / π_θ(i|x, y_<t)) ] + …                  p: the teacher's; i: its top k, and ∅

Departures, each with its reason:
1. The words precede the row's own tokens, which are never tokenized again; in SDPO they follow the prompt.
2. The difference is clipped: a few tokens would outweigh all others (as in the code of arXiv 2603.12273).
3. With top_k nothing is clipped: the derivative by a logit is p − π. All other tokens are one class; without it, the
   divergence would not be 0 where both agree. The divergence does not depend on the token that was sampled, so that
   token's importance weight does not apply: m_t is 0 where w_t is 0, else 1.
4. Words without effect are left out, and so are words that contradict the turn's reward: blame for a reward above
   the mean and in the highest quarter of the range of recent rewards, or praise for one below and in the lowest.
5. The teacher is a running average of the weights, as in SDPO, unless `teacher` selects π_prox or the last version.

E is the mean over the tokens of the minibatch whose words are used.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from shared.config import HintConfig
from trainer_service.algorithms.advantages import kl_penalties
from trainer_service.algorithms.seam import Batch, Constants, Figures, Floats, Memory, Needs, Now, Precomputed, Unit
from trainer_service.algorithms.surrogates import PartialPolicyGradient as Partial
from trainer_service.algorithms.surrogates import divergence_with_tail, policy_constants, policy_needs

WINDOW = 256  # number of recent rewards


class Hint(Partial[HintConfig]):
    @property
    def needs(self) -> Needs:
        return Needs.TEACHER | policy_needs(self.config)

    @property
    def top(self) -> int:
        """Number of the teacher's most likely tokens to precompute."""
        return self.config.top_k

    def units(self, batch: Batch) -> list[Unit]:
        return [Unit((place,), (words,)) for place, about in sorted(batch.words.items()) for words in about]

    def constants(
        self, batch: Batch, units: list[Unit], precomputed: Precomputed, memory: Memory
    ) -> tuple[Constants, Figures]:
        sequences = [Unit(members) for members in sorted({unit.members for unit in units})]  # each of them once
        whole, figures = policy_constants(batch, sequences, precomputed, self.config)
        whole["penalties"] = kl_penalties(sequences, precomputed, self.config)
        constants = _at_words(units, sequences, whole)
        figures |= {"hints": float(len(units)), "hints_contradicting": 0.0, "hints_without_effect": 0.0}
        for name in ("advantages", "counts", "effects"):
            constants[name] = [np.zeros_like(proximal) for proximal in constants["proximal"]]
        neutral, kind = self._neutral(batch, units, memory), "effects" if self.top else "advantages"
        for number, (words, teacher) in enumerate(zip((u.words[0] for u in units), precomputed.teacher, strict=True)):
            bound = self.config.advantage_bound
            effect = (teacher - constants["proximal"][number]).clip(-bound, bound)
            reason = self._exclusion_reason(effect, words.reward, neutral)
            if reason is None:
                constants[kind][number][:], constants["counts"][number][:] = effect, 1
            else:
                figures[reason] += 1
        if self.top:
            constants["divergence_weights"] = [(weights > 0).astype(np.float32) for weights in constants["weights"]]
            constants |= {"others": precomputed.top, "top_logprobs": precomputed.top_logprobs}
        changes, counted = (np.concatenate(constants[name], dtype=np.float64) for name in (kind, "counts"))
        figures["hint_effect"] = float(np.abs(changes).sum() / max(1.0, counted.sum()))
        for number, penalty in enumerate(constants.pop("penalties", [])):
            constants["advantages"][number] -= constants["counts"][number] * penalty
        return constants, figures

    def loss(self, now: Now, constants: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, sums = super().loss(now, constants)
        if now.others_KN is not None:
            counts_K = constants["counts"] > 0
            gap_K = divergence_with_tail(constants["top_logprobs"][counts_K], now.others_KN[counts_K])
            loss = loss + (constants["divergence_weights"][counts_K] * gap_K).sum()
            sums["kl_to_teacher"] = gap_K.detach().sum()
        return loss, sums

    def _neutral(self, batch: Batch, units: list[Unit], memory: Memory) -> tuple[float, float]:
        """Return the range of rewards that contradict no words. Adds the batch's rewards to `memory`."""
        fixed = self.config.neutral_reward
        if not isinstance(fixed, str):
            return (-np.inf, np.inf) if fixed is None else (fixed, fixed)
        known, of_words = {*batch.rewarded, *batch.rehearsed}, [(u.members[0], u.words[0].reward) for u in units]
        new = [*batch.rewards, *(reward for place, reward in of_words if reward is not None and place not in known)]
        memory["rewards"] = [*memory.get("rewards", []), *new][-WINDOW:]
        ordered, outer = sorted(memory["rewards"]) or [0.0], len(memory["rewards"]) // 100  # outliers
        kept = ordered[outer : len(ordered) - outer]
        mean, quarter = float(np.mean(kept)), (kept[-1] - kept[0]) / 4
        return min(mean, kept[0] + quarter), max(mean, kept[-1] - quarter)

    def _exclusion_reason(self, effect: Floats, reward: float | None, neutral: tuple[float, float]) -> str | None:
        """Return the figure that counts these words as left out; None: they are used."""
        if float(np.abs(effect).mean()) < self.config.least_effect:
            return "hints_without_effect"
        is_good = None if reward is None or neutral[0] <= reward <= neutral[1] else reward > neutral[1]
        return None if is_good is None or float(effect.mean()) * (1 if is_good else -1) >= 0 else "hints_contradicting"


def _at_words(units: list[Unit], sequences: list[Unit], whole: Constants) -> Constants:
    """Return arrays of whole sequences, [A], at the actions that each unit's words are about: [B]; no empty lists."""
    numbers = {sequence.members: number for number, sequence in enumerate(sequences)}
    places = [(numbers[unit.members], unit.words[0].actions) for unit in units]
    return {name: [arrays[number][own] for number, own in places] for name, arrays in whole.items() if arrays}
