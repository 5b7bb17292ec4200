"""The time of a step. Imports only PyTorch, for the peers' Python."""

from __future__ import annotations

import time

import torch

STEPS = {"cpu": 1, "cuda": 4}
"""Optimizer steps of a turn, by device, each on all rows. With more than one, the first is not counted."""


def seconds(device: str) -> float:
    """CPU seconds of this process; on an accelerator, elapsed seconds after its queue is empty."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()
