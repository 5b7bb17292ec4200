"""How full packed rows are, and how little of the shared tokens is computed twice. No model runs."""

from __future__ import annotations

import numpy as np

from benchmarks.trainer.cases import Row, distinct_tokens, rows
from benchmarks.trainer.worker import experiences, packing_figures
from trainer_service.algorithms.seam import Batch
from trainer_service.packing import pack
from trainer_service.trajectories import trajectories_of

BUDGET = 4096  # trainer.max_tokens_per_micro_batch's default


def figures() -> dict[str, float]:
    """packing_efficiency of a log-normal mix; with shared prefixes, computed tokens relative to distinct ones."""
    found = {"efficiency_log_normal": _packed(_log_normal(), BUDGET)["packing_efficiency"]}
    for name, made in (("turns", rows("turns")), ("system", rows("system")), ("agents", _agents())):
        found[f"computed_of_distinct_{name}"] = _packed(made, 8192)["tokens_computed"] / distinct_tokens(made)
    return found


def _packed(made: list[Row], budget: int) -> dict[str, float]:
    sequences = Batch.of(trajectories_of(experiences(made))).sequences
    return packing_figures(pack(sequences, range(len(sequences)), budget), budget)


def _log_normal() -> list[Row]:
    """512 sequences, median 300 tokens, a tenth of them above 840."""
    draw = np.random.default_rng(0)
    lengths = np.exp(draw.normal(np.log(300), 0.8, 512)).clip(8, BUDGET).astype(int).tolist()
    return [_row([], length, number, draw) for number, length in enumerate(lengths)]


def _agents() -> list[Row]:
    """4 agents with a system prompt of 300 tokens, 4 conversations each, 4 continuations of each."""
    draw, found = np.random.default_rng(0), []
    for _ in range(4):
        system = draw.integers(0, 32_000, 300).tolist()
        for _ in range(4):
            history = system + draw.integers(0, 32_000, 60).tolist()
            found += [_row(history, 41, len(found) + way, draw) for way in range(4)]
    return found


def _row(before: list[int], length: int, number: int, draw: np.random.Generator) -> Row:
    ids = draw.integers(0, 32_000, length).tolist()
    return Row(before + ids[:1], ids[1:], str(number))
