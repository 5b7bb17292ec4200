"""A sample, for tests that store it."""

from __future__ import annotations

import time

import numpy as np

from shared.experience import Sample, Sampling, Tokens


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
