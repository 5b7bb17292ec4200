"""What time a step takes. Imports PyTorch alone, for the peers' Python."""

from __future__ import annotations

import time

import torch


def seconds(device: str) -> float:
    """CPU seconds of this process; on an accelerator, elapsed seconds, once it has done all that it was given."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()
