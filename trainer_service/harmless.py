"""A row that no update can fail on: if one does, the settings or the machine are the cause."""

from __future__ import annotations

import numpy as np

from shared.experience import Experience, Sampling, Tokens


def harmless_row() -> Experience:
    """Return a row of three tokens that every model has, with the reward 1."""
    tokens = Tokens(np.zeros(1, np.int32), np.array([1, 0], np.int32), np.full(2, -1.0, np.float32))
    return Experience(0, "harmless", 0, None, None, None, "harmless", 0, 1.0, 0.0, tokens, Sampling())
