"""Advantages of attempts: how much better each was than other attempts at its task, or than earlier ones.

A group (Shao et al. 2024, "DeepSeekMath", section 4.1; leave-one-out: Kool et al. 2019, Ahmadian et al. 2024): the
attempts at one task.

    Â = (R − mean R) / std R             over the attempts of the group
    Â = R − mean of the others' R        leave-one-out

A tracker (Xu & Ding 2025, "Single-stream Policy Optimization", arXiv 2509.13232): earlier scores of similar attempts.

    n ← 2^−h n + 1,  m ← m + (R − m) / n       h: half-lives since the last attempt; at each of three levels
    v_l = (n_l m_l + κ v_{l−1}) / (n_l + κ)    from all attempts (l = 1) to those of a system prompt and of a task
    Â = R − v_3                                with the values before the batch

n m and n (1 − m) are the two counts of a Beta distribution if R lies in [0, 1]; n and m are those of a Gaussian mean.

Shapes: A actions of one sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from shared.config import GroupConfig, SPOConfig, SurrogateConfig
from trainer_service.algorithms.advantages import (
    Scale,
    Span,
    is_zero,
    kl_penalties,
    numbers_of,
    returns,
    reward_scale,
    running_moments,
    turn_costs,
)
from trainer_service.algorithms.seam import Batch, Figures, Floats, Memory, Precomputed, Unit, pick
from trainer_service.trajectories import Trajectory


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one score is for: a trajectory, an alternative to some of its turns, or a turn."""

    group: Hashable  # attempts of one group are compared
    levels: tuple[str, ...]  # keys in a tracker: all, its system prompt, its task
    score: float  # its undiscounted return minus its KL penalty
    spans: list[Span]  # its actions


def attempts(
    batch: Batch,
    units: list[Unit],
    precomputed: Precomputed,
    config: SurrogateConfig,
    memory: Memory,
    *,
    by_turn: bool = False,
    prompt_tokens: int = 0,
) -> list[Attempt]:
    """Return the attempts of a batch. units: one for each sequence. prompt_tokens: length of a system prompt's prefix.

    Attempts at one task form a group. Without a task, the alternatives of a trajectory form one, and so do trajectories
    that start with choices of one message for one prompt. Turns of a group are compared if equally many turns precede
    them in their trajectories. Alternatives that share one outcome, without rewards for turns, are one attempt.
    """
    scale = reward_scale(batch, units, config, memory)
    sequences = pick(batch.sequences, units)
    penalties = kl_penalties(units, precomputed, config) or [np.zeros_like(one.rewards) for one in sequences]
    earned = [returns(one.rewards, 1.0) for one in sequences]
    number = numbers_of(units)
    found: list[Attempt] = []
    for position, (trajectory, places) in enumerate(zip(batch.trajectories, batch.members, strict=True)):
        if not places or places[0] not in number:
            continue
        task = None if trajectory.task_id is None else (trajectory.key_group, trajectory.task_id)
        prompt = trajectory.sequences[0].token_ids[: int(trajectory.sequences[0].actions[0])].tolist()
        levels = ("", _digest("prompt", prompt[:prompt_tokens]), *(() if task is None else (_digest("task", task),)))
        group = task or (trajectory.msg_id or position, _digest("prompt", prompt))
        spans, costs = turn_costs(trajectory, [number[place] for place in places], penalties)
        own = [float(earned[one][begin]) for one, begin, _ in spans]
        scores = (_scores_of_turns if by_turn else _scores_of_paths)(trajectory, own, costs, scale)
        for depth, turns in _parts(trajectory, by_turn=by_turn):
            found.append(Attempt((group, depth), levels, scores[turns[0]], [spans[turn] for turn in turns]))
    return found


def _scores_of_turns(trajectory: Trajectory, earned: list[float], costs: list[float], scale: Scale) -> list[float]:
    """Return each turn's score: what it and later turns earned and cost. earned, costs: see `_scores_of_paths`."""
    return [scale.of(own) - cost for own, cost in zip(earned, trajectory.lineage.totals(costs), strict=True)]


def _scores_of_paths(trajectory: Trajectory, earned: list[float], costs: list[float], scale: Scale) -> list[float]:
    """Return for each turn the score of the path through it, which includes what the turns before it earned and cost.

    earned: undiscounted return of each turn. costs: KL penalty of each turn's own actions.
    """
    lineage = trajectory.lineage
    before = lineage.before([reward or 0.0 for reward in trajectory.turn_rewards])
    returned = [scale.of(own + earlier) for own, earlier in zip(earned, before, strict=True)]
    paid = zip(lineage.totals(costs), lineage.before(costs), strict=True)
    return [value - (later + earlier) for value, (later, earlier) in zip(returned, paid, strict=True)]


def _parts(trajectory: Trajectory, *, by_turn: bool) -> list[tuple[int, list[int]]]:
    """Return the turns that have a score together, each time with the number of turns before them.

    These are the main path of a trajectory, through all of its trees, and each side path; or each turn.
    """
    lineage, one_outcome = trajectory.lineage, all(reward is None for reward in trajectory.turn_rewards)
    depths = [int(depth) for depth in lineage.before([1.0] * len(trajectory.turns))]
    parts: dict[Hashable, list[int]] = {}
    for turn, side in enumerate(lineage.sides):
        if one_outcome:  # what alternatives earned is the same, so each would be the other's baseline
            part: Hashable = (lineage.trees[turn], depths[turn]) if by_turn else None
        else:
            part = turn if by_turn else side
        parts.setdefault(part, []).append(turn)
    return [(depths[turns[0]] if by_turn else 0, turns) for turns in parts.values()]


def group_advantages(
    batch: Batch,
    units: list[Unit],
    precomputed: Precomputed,
    config: GroupConfig,
    memory: Memory,
    *,
    by_turn: bool = False,
    leave_one_out: bool = False,
) -> tuple[list[Floats], Figures]:
    """Return advantages of the units' sequences, [A] each: attempts, or turns, are compared within their groups."""
    found = attempts(batch, units, precomputed, config, memory, by_turn=by_turn)
    advantages, figures = grouped(found, config, memory, leave_one_out=leave_one_out)
    return spread(found, advantages, pick(precomputed.proximal, units)), figures


def spread(found: list[Attempt], advantages: Sequence[float], like: list[Floats]) -> list[Floats]:
    """Assign each attempt's advantage to all its actions: [A] for each sequence, shaped like `like`."""
    arrays = [np.zeros_like(one) for one in like]
    for attempt, advantage in zip(found, advantages, strict=True):
        for number, begin, end in attempt.spans:
            arrays[number][begin:end] = advantage
    return arrays


def grouped(
    found: list[Attempt], config: GroupConfig, memory: Memory, *, leave_one_out: bool
) -> tuple[list[float], Figures]:
    """Compare each attempt with its group; a group of one with the mean of all scores. Changes `memory`."""
    scores, advantages = np.array([one.score for one in found]), np.zeros(len(found))
    mean, std = running_moments(memory, [np.array([one.score], np.float32) for one in found], config.baseline_sequences)
    members: dict[Hashable, list[int]] = {}
    for number, one in enumerate(found):
        members.setdefault(one.group, []).append(number)
    equal = 0
    for own in members.values():
        count, centre, deviation = len(own), mean, std
        if count > 1:
            centre, deviation = float(scores[own].mean()), float(scores[own].std(ddof=1))
            equal += is_zero(deviation, centre)
        width = {"group": deviation, "batch": std, "none": 1.0}[config.scale]
        if is_zero(deviation, centre) or is_zero(width, centre if config.scale == "group" else mean):
            continue
        stretch = count / (count - 1) if leave_one_out and count > 1 else 1.0  # gives R − mean of the others
        advantages[own] = stretch * (scores[own] - centre) / width
    singles = sum(len(own) == 1 for own in members.values())
    figures = {"groups": len(members), "groups_of_one": singles, "groups_of_equals": equal, "baseline": mean}
    return advantages.tolist(), {name: float(value) for name, value in figures.items()}


def tracked(found: list[Attempt], memory: Memory, drift: float, config: SPOConfig) -> list[float]:
    """Return v of each attempt from the values before this batch; then add the batch to `memory`.

    drift: KL divergence of the trainer's policy from the samplers', nats per token.
    memory: "clock", half-lives so far; "seen", by key: n, m and the clock at the last attempt.
    """
    low, high = config.bounds or (0.0, 1.0)
    scores = [(one.score - low) / (high - low) for one in found]
    if config.bounds is not None:
        scores = [min(max(score, 0.0), 1.0) for score in scores]
    clock = memory.get("clock", 0.0)
    clock += drift / config.half_life_kl if config.half_life_kl is not None else 0.0
    clock += 1 / config.half_life_updates if config.half_life_updates is not None else 0.0
    seen: dict[str, list[float]] = memory.get("seen", {})
    values = []
    for attempt in found:
        value = 0.5 if config.bounds is not None else float(np.mean(scores))
        for key in attempt.levels:
            count, mean, at = seen.get(key, (0.0, 0.0, clock))
            count *= 2.0 ** (at - clock)
            value = (count * mean + config.shrinkage * value) / (count + config.shrinkage)
        values.append(low + (high - low) * value)
    for attempt, score in zip(found, scores, strict=True):
        for key in reversed(attempt.levels):  # orders keys by last use, and keeps the key of all attempts
            count, mean, at = seen.pop(key, (0.0, 0.0, clock))
            count = count * 2.0 ** (at - clock) + 1
            seen[key] = [count, mean + (score - mean) / count, clock]
    for key in list(seen)[: max(0, len(seen) - config.max_keys)]:
        del seen[key]
    memory.update(clock=clock, seen=seen)
    return values


def _digest(*parts: object) -> str:
    """Return a name for a level with 16 characters."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
