"""Samples, for tests that store them."""

from __future__ import annotations

import time

import numpy as np

from shared.experience import Sample, Sampling, Tokens
from shared.ledger import transitions
from shared.ledger.connect import Ledger


def sample(msg_id: str, **more: object) -> Sample:
    tokens = Tokens(np.array([1, 2], np.int32), np.array([3], np.int32), np.array([-0.5], np.float32))
    fields = {
        "tokens": tokens,
        "choice": 0,
        "version": 0,
        "version_end": 0,
        "finish_reason": "stop",
        "latency_s": 0.1,
        **more,
    }
    return Sample(msg_id=msg_id, sampling=Sampling(), created_at=time.time(), **fields)  # type: ignore[arg-type]


def record(ledger: Ledger, count: int, **more: object) -> list[str]:
    """Store samples. Returns their message ids."""
    names = [f"chatcmpl-{number:07}" for number in range(count)]
    for start in range(0, count, 2000):
        with ledger.write() as connection:
            transitions.record(connection, [sample(name, **more) for name in names[start : start + 2000]])
    return names
