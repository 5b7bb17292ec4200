"""Generalized advantage estimation (Schulman et al. 2016, "High-Dimensional Continuous Control Using GAE", eq. 11-16).

    δ_t = r_t + γ V(s_{t+1}) − V(s_t)
    Â_t = δ_t + γλ Â_{t+1}              backwards from the end of the trajectory, where V = 0
    R_t = Â_t + V(s_t)                   the critic's target

A state is the text before a sampled token, an action the token. Tokens that were not sampled (prompts, tool results)
are no actions: t runs over the sampled tokens of a trajectory alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def gae(rewards_A: Floats, values_A: Floats, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Advantages and returns of one trajectory.

    rewards_A: [A] reward after each action; values_A: [A] V(s_t) before it.
    Returns: advantages [A], returns [A].
    """
    advantages_A = np.zeros_like(values_A)
    following, next_value = 0.0, 0.0
    for t in range(len(rewards_A) - 1, -1, -1):
        delta = float(rewards_A[t]) + gamma * next_value - float(values_A[t])
        following = delta + gamma * lam * following
        advantages_A[t] = following
        next_value = float(values_A[t])
    return advantages_A, advantages_A + values_A


def whiten(advantages: list[Floats]) -> list[Floats]:
    """Shift and scale to mean 0 and standard deviation 1 over all tokens of the batch."""
    flat = np.concatenate(advantages)
    scale = float(flat.std()) + 1e-8
    mean = float(flat.mean())
    return [((a - mean) / scale).astype(np.float32) for a in advantages]
