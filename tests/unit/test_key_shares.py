"""A key's share of the gradient of each algorithm: by hand, and as autograd finds it at the start of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shared.config import (
    DistillConfig,
    DPOConfig,
    GRPOConfig,
    HintConfig,
    KTOConfig,
    RAFTConfig,
    ReinforcePPConfig,
    RLOOConfig,
    SFTConfig,
    SPOConfig,
    StepGRPOConfig,
)
from shared.experience import Experience, Other
from shared.reward import Signal
from tests.support.batches import loss_of, precomputed, rows_batch
from tests.unit.test_groups import row
from trainer_service.algorithms.distill import Distill
from trainer_service.algorithms.dpo import DPO
from trainer_service.algorithms.grpo import GRPO
from trainer_service.algorithms.hint import Hint
from trainer_service.algorithms.kto import KTO
from trainer_service.algorithms.raft import RAFT
from trainer_service.algorithms.reinforce_pp import ReinforcePP
from trainer_service.algorithms.rloo import RLOO
from trainer_service.algorithms.seam import Algorithm, Batch
from trainer_service.algorithms.sft import SFT
from trainer_service.algorithms.spo import SPO
from trainer_service.algorithms.step_grpo import StepGRPO

LOUD, CALM = ["loud"] * 6, ["ann", "bea", "cem", "dan"]
KEYS = [*LOUD, *CALM]  # who spoke of each of ten rows
SHARE = 0.3


def said(kind: Any, key: str | None, **what: Any) -> tuple[Signal, ...]:
    return (Signal(kind, key_name=key, **what),)


def rated(number: int, key: str) -> Experience:
    return row(number, None, None, -1.0, signals=said("rating", key, text="down"))


def praised(number: int, key: str) -> Experience:
    reward = number / 10
    return row(number, f"task{number % 2}", str(number), reward, signals=said("reward", key, value=reward))


def corrected(number: int, key: str) -> Experience:
    answer = np.arange(60, 62 + number % 3, dtype=np.int32)
    about = {"correction": answer, "correction_key": key, "signals": said("correction", key, text="so")}
    return row(number, None, None, None, **about)


def preferred(number: int, key: str) -> Experience:
    other = row(20 + number, None, None, None)
    over = (Other(other.msg_id, other.tokens, other.sampling, key),)
    signals = said("preferred_over", key, text=other.msg_id)
    return row(number, None, None, None, preferred_over=over, signals=signals)


def commented(number: int, key: str) -> Experience:
    """The words are the key's; the rating is somebody else's."""
    signals = (*said("reward", f"rater{number}", value=1.0), *said("comment", key, text="shorter"))
    return row(number, None, None, 1.0, signals=signals, hint=np.array([7], np.int32), hint_key=key)


FREE: dict[str, Any] = {"kl_coef": 0.0, "outlier_bound": None}
WORDS: dict[str, Any] = {"least_effect": 0.0, "neutral_reward": None}
CASES: dict[str, tuple[Algorithm, Callable[[int, str], Experience]]] = {
    "kto": (KTO(KTOConfig()), rated),
    "dpo": (DPO(DPOConfig()), preferred),
    "dpo of corrections, smoothed": (DPO(DPOConfig(label_smoothing=0.1)), corrected),
    "sft": (SFT(SFTConfig()), corrected),
    "raft": (RAFT(RAFTConfig(above=0.0)), praised),
    "hint": (Hint(HintConfig(top_k=0, **WORDS)), commented),
    "reinforce_pp": (ReinforcePP(ReinforcePPConfig(**FREE)), praised),
    "reinforce_pp over sequences": (ReinforcePP(ReinforcePPConfig(mean="sequences", **FREE)), praised),
    "spo": (SPO(SPOConfig(**FREE)), praised),
    "grpo": (GRPO(GRPOConfig(**FREE)), praised),
    "rloo": (RLOO(RLOOConfig(**FREE)), praised),
    "step_grpo": (StepGRPO(StepGRPOConfig(**FREE)), praised),
}


def pulls(algorithm: Algorithm, batch: Batch, max_share: float, draw: np.random.Generator) -> list[float]:
    """Σ |∂ loss / ∂ log π| of each sequence, at the start of the batch, where the policy is not the base model."""
    algorithm.units(replace(batch, sequences=(more := list(batch.sequences))))
    seen = {
        name: [draw.normal(-2, 0.5, len(one.actions)).astype(np.float32) for one in more]
        for name in ("proximal", "reference", "teacher")
    }
    logprobs = [torch.tensor(one, requires_grad=True) for one in seen["proximal"]]
    about = precomputed(batch, **{**seen, "processed": [one.behaviour for one in more]})
    loss, _ = loss_of(algorithm, batch, about, logprobs, max_share=max_share)
    loss.backward()
    return [0.0 if one.grad is None else float(one.grad.abs().sum()) for one in logprobs]


def by_key(found: Sequence[float], batch: Batch, keys: Sequence[str]) -> dict[str, float]:
    """Of sequences by the keys that spoke of their rows. Those that are no row's belong to the preference that they
    are in."""
    names = {place: keys[one.row_ids[0] - 1] for place, one in enumerate(batch.sequences) if one.row_ids[0] < 20}
    names |= {worse: names[better] for better, worse in batch.pairs if better in names}
    total: dict[str, float] = dict.fromkeys(keys, 0.0)
    for place, pull in enumerate(found):
        if pull:
            total[names[place]] += pull
    return total


@pytest.mark.parametrize("case", CASES)
def test_the_key_that_says_most_has_its_share_of_the_gradient_and_of_the_others_none_has_more(case):
    algorithm, make = CASES[case]
    rows = [make(number, key) for number, key in enumerate(KEYS, start=1)]
    free, bound = (
        by_key(pulls(algorithm, batch, share, np.random.default_rng(7)), batch, KEYS)
        for share in (1.0, SHARE)
        for batch in [rows_batch(rows)]
    )
    assert free["loud"] > SHARE * sum(free.values()), "without a bound it has more"
    assert bound["loud"] == pytest.approx(SHARE * sum(bound.values()), rel=1e-4)
    assert [bound[key] for key in CALM] == pytest.approx([min(free[key], bound["loud"]) for key in CALM], rel=1e-4)
