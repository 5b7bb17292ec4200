"""Settings for tiny models that learn from groups: several runs of one task, compared with one another."""

from __future__ import annotations

from typing import Any

TRAINER: dict[str, Any] = {
    "algorithm": "grpo",
    "batch_size": 288,
    "max_staleness_versions": 4,
    "learning_rate": 3.0e-4,
    "max_tokens_per_micro_batch": 2048,
    "epochs": 1,
    "minibatches": 2,
    "grpo": {"scale": "batch", "kl_coef": 0.02, "entropy_coef": 0.003},
}
LEARN: dict[str, Any] = {"runs_per_task": 8, "at_once": 24, "max_ready_rows": 576, "timeout_s": 60.0}
