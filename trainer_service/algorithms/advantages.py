"""Advantages: how much better each action was than expected. Those of attempts are in attempts.py.

Generalized advantage estimation (Schulman et al. 2016, "High-Dimensional Continuous Control Using GAE", eq. 11-16):

    δ_t = r_t + γ V(s_{t+1}) − V(s_t)
    Â_t = δ_t + γλ Â_{t+1}              backwards from the end of the trajectory, where V = 0
    R_t = Â_t + V(s_t)                   the critic's target

A global baseline (Hu et al. 2025, "REINFORCE++", arXiv 2501.03262): mean and standard deviation of all returns.

    G_t = r_t + γ G_{t+1}                backwards from the end of the trajectory
    Â_t = (G_t − mean G) / std G         over all tokens of the batch, and of earlier ones while batches are small

A state is the text before a sampled token, an action is the token. Tokens that were not sampled (prompts, tool results)
are not actions: t runs only over the sampled tokens of a trajectory. Shapes: A actions of one trajectory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shared.config import SurrogateConfig
from trainer_service.algorithms.seam import Batch, Floats, Memory, Precomputed, Unit, pick
from trainer_service.algorithms.surrogates import divergence
from trainer_service.trajectories import Trajectory

Span = tuple[int, int, int]  # actions: index of a sequence of the units, first action, index after the last
_REWARDS = 1024  # sequences over which the deviation of their turns' returns is taken
_SAME = 1e-6  # a smaller standard deviation, relative to the mean, is a rounding error


def gae(rewards_A: Floats, values_A: Floats, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Return advantages and returns of one trajectory, [A] each.

    rewards_A: [A] reward after each action; values_A: [A] V(s_t) before it.
    """
    advantages_A = np.zeros_like(values_A)
    following, next_value = 0.0, 0.0
    for t in range(len(rewards_A) - 1, -1, -1):
        delta = float(rewards_A[t]) + gamma * next_value - float(values_A[t])
        following = delta + gamma * lam * following
        advantages_A[t] = following
        next_value = float(values_A[t])
    return advantages_A, advantages_A + values_A


def returns(rewards_A: Floats, gamma: float) -> Floats:
    """Return G_t of one trajectory: [A]."""
    return gae(rewards_A, np.zeros_like(rewards_A), gamma, 1.0)[1]


def is_zero(std: float, mean: float) -> bool:
    """Whether numbers with this mean and standard deviation are equal up to rounding."""
    return std < _SAME * max(1.0, abs(mean))


def whiten(advantages: list[Floats]) -> list[Floats]:
    """Shift and scale to mean 0 and standard deviation 1 over all tokens of the batch; equal values become 0."""
    flat = np.concatenate(advantages, dtype=np.float64)
    return standardize(advantages, float(flat.mean()), float(flat.std()))


def standardize(arrays: list[Floats], mean: float, std: float) -> list[Floats]:
    """Return (x − mean) / std, computed in float64; 0 if the standard deviation is 0 up to rounding."""
    if is_zero(std, mean):
        return [np.zeros_like(array, np.float32) for array in arrays]
    return [((array.astype(np.float64) - mean) / std).astype(np.float32) for array in arrays]


def running_moments(memory: Memory, arrays: list[Floats], window: int) -> tuple[float, float]:
    """Return mean and standard deviation over all numbers of a batch and, while it is small, of earlier batches.

    arrays: one for each sequence. A batch of fewer sequences than `window` is completed with the moments in `memory`,
    which count as the missing sequences, at most as many as they come from. Changes `memory`.
    """
    flat = np.concatenate(arrays, dtype=np.float64)
    mean, variance, count = float(flat.mean()), float(flat.var()), len(arrays)
    earlier = min(memory.get("sequences", 0), max(0, window - count))
    if earlier:
        share = earlier / (earlier + count)
        distance = memory["mean"] - mean
        variance = share * memory["variance"] + (1 - share) * variance + share * (1 - share) * distance**2
        mean += share * distance
    memory.update(sequences=earlier + count, mean=mean, variance=variance)
    return mean, math.sqrt(variance)


def shaped_rewards(
    batch: Batch, units: list[Unit], precomputed: Precomputed, config: SurrogateConfig, memory: Memory
) -> list[Floats]:
    """Return rewards of the units' sequences, [A] each, minus a KL penalty for each token if it is in the reward.

    r_t = reward − β KL_t, with k1 β (log π_prox − log π_ref)                             (Ziegler et al. 2019, eq. 2)

    The last action of a turn also pays for the later turns of its trajectory in other sequences, so that a turn's
    return does not depend on whether turns merged. units: one for each sequence.
    """
    rewards, penalties = given_rewards(batch, units, config, memory), kl_penalties(units, precomputed, config)
    if not penalties:
        return rewards
    shaped = [r - penalty for r, penalty in zip(rewards, penalties, strict=True)]
    number = numbers_of(units)
    for trajectory, places in zip(batch.trajectories, batch.members, strict=True):
        if len(places) < 2 or places[0] not in number:
            continue
        spans, costs = turn_costs(trajectory, [number[place] for place in places], penalties)
        for (one, _, end), later in zip(spans, _in_other_sequences(trajectory, costs), strict=True):
            shaped[one][end - 1] -= later
    return shaped


def turn_costs(trajectory: Trajectory, own: list[int], penalties: list[Floats]) -> tuple[list[Span], list[float]]:
    """Return the span of each turn, and the penalty of its own actions.

    own: indices of the trajectory's sequences in `penalties`.
    """
    spans = [(own[number], begin, end) for number, begin, end in trajectory.turn_spans()]
    return spans, [float(penalties[one][begin:end].sum()) for one, begin, end in spans]


def _in_other_sequences(trajectory: Trajectory, costs: list[float]) -> list[float]:
    """For each turn: what the turns that it led to cost, without the later ones of its own sequence.

    As differences: the sum of the results from a turn to the end of its sequence is what they cost after that turn.
    """
    own, following = defaultdict[int, float](float), defaultdict[int, float](float)
    found = []
    turns = zip(trajectory.turns, costs, trajectory.lineage.totals(costs), strict=True)
    for number, cost, total in reversed(list(turns)):
        own[number] += cost
        found.append(total - own[number] - following[number])
        following[number] = total - own[number]
    return found[::-1]


def numbers_of(units: list[Unit]) -> dict[int, int]:
    """Return the index of each unit by the place of its sequence. units: one for each sequence."""
    return {unit.members[0]: position for position, unit in enumerate(units)}


def given_rewards(batch: Batch, units: list[Unit], config: SurrogateConfig, memory: Memory) -> list[Floats]:
    """Return rewards of the units' sequences, [A] each, with bounded outliers and, if configured, a common scale."""
    sequences, unit = pick(batch.sequences, units), reward_scale(batch, units, config, memory).unit
    rewards = bound_outliers([s.rewards for s in sequences], [s.ends for s in sequences], config.outlier_bound)
    return rewards if unit == 1.0 else [r / np.float32(unit) for r in rewards]


@dataclass(frozen=True, slots=True)
class Scale:
    """What returns are brought to before they are compared."""

    low: float
    high: float
    unit: float

    def of(self, value: float) -> float:
        return min(max(value, self.low), self.high) / self.unit


def reward_scale(batch: Batch, units: list[Unit], config: SurrogateConfig, memory: Memory) -> Scale:
    """Return the bounds of the returns of the units' turns and, if configured, their deviation. Changes `memory`."""
    earned = [_earned(sequence.rewards, sequence.ends) for sequence in pick(batch.sequences, units)]
    low, high = _bounds(earned, config.outlier_bound)
    if not config.normalize_rewards:
        return Scale(low, high, 1.0)
    bounded = [one.clip(low, high).astype(np.float32) for one in earned]  # whether or not turns merged
    _, std = running_moments(memory.setdefault("rewards", {}), bounded, _REWARDS)
    return Scale(low, high, 1.0 if is_zero(std, 0.0) else std)


def kl_penalties(units: list[Unit], precomputed: Precomputed, config: SurrogateConfig) -> list[Floats]:
    """Return β KL_t of the units' sequences, [A] each; an empty list if the reward has no penalty."""
    if not config.kl_coef or config.kl_in == "loss":
        return []
    gaps = [p - q for p, q in zip(pick(precomputed.proximal, units), pick(precomputed.reference, units), strict=True)]
    return [np.float32(config.kl_coef) * divergence(torch.from_numpy(gap), config.kl).numpy() for gap in gaps]


def bound_outliers(rewards: list[Floats], ends: list[list[int]], bound: float | None) -> list[Floats]:
    """Bound returns of turns to `bound` times their median distance from the median, so that none outweighs the others.

    ends: of each array, the indices of rewards, one of each turn. Distances of 0, up to rounding, are ignored: if most
    returns are equal, the few others are no outliers.
    """
    earned = [_earned(r, places) for r, places in zip(rewards, ends, strict=True)]
    low, high = _bounds(earned, bound)
    bounded = [r.copy() for r in rewards]
    for r, places, own in zip(bounded, ends, earned, strict=True):
        if ((own < low) | (own > high)).any():
            r[places] = -np.diff(own.clip(low, high), append=0.0)
    return bounded


def _earned(rewards: Floats, places: list[int]) -> npt.NDArray[np.float64]:
    """Return the returns of a sequence's turns. places: the indices of their rewards."""
    earned: npt.NDArray[np.float64] = rewards[places][::-1].cumsum(dtype=np.float64)[::-1]
    return earned


def _bounds(earned: list[npt.NDArray[np.float64]], bound: float | None) -> tuple[float, float]:
    given = np.concatenate(earned)
    centre = float(np.median(given))
    distances = np.abs(given - centre)
    distances = distances[distances >= _SAME * max(1.0, abs(centre))]
    width = math.inf if bound is None or not len(distances) else bound * float(np.median(distances))
    return centre - width, centre + width
