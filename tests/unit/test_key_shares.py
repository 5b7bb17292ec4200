"""A key's share of the gradient of each algorithm: by hand, and as autograd finds it at the start of a batch."""

from __future__ import annotations

import math
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
from tests.support.batches import array, loss_of, precomputed, rows_batch
from tests.unit.test_groups import row
from trainer_service.algorithms.distill import Distill
from trainer_service.algorithms.dpo import DPO
from trainer_service.algorithms.grpo import GRPO
from trainer_service.algorithms.hint import Hint
from trainer_service.algorithms.kto import KTO
from trainer_service.algorithms.raft import RAFT
from trainer_service.algorithms.registry import PAGES
from trainer_service.algorithms.reinforce_pp import ReinforcePP
from trainer_service.algorithms.rloo import RLOO
from trainer_service.algorithms.seam import Algorithm, Batch
from trainer_service.algorithms.sft import SFT
from trainer_service.algorithms.spo import SPO
from trainer_service.algorithms.step_grpo import StepGRPO
from trainer_service.shares import bound_shares, keys_of

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


def test_the_cases_are_all_algorithms_but_the_one_with_a_critic_and_the_one_that_learns_from_a_teacher():
    assert {type(algorithm).__name__ for algorithm, _ in CASES.values()} == {
        page.__name__ for name, page in PAGES.items() if name not in ("ppo", "distill")
    }


@pytest.mark.parametrize("case", CASES)
def test_the_key_with_most_signals_is_bounded_to_its_share_and_no_other_exceeds_it(case):
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


def test_a_teacher_s_logprobs_belong_to_no_key_and_are_not_bounded():
    rows = [praised(number, key) for number, key in enumerate(KEYS, start=1)]
    algorithm = Distill(DistillConfig(path="teacher", kl_coef=0.0))
    free, bound = (pulls(algorithm, rows_batch(rows), share, np.random.default_rng(7)) for share in (1.0, SHARE))
    assert free == bound and all(free)


def test_a_page_s_size_does_not_depend_on_its_weights():
    """Else a minibatch of one key's rows alone would undo what the bound did to them."""
    for algorithm, make in CASES.values():
        batch = rows_batch([make(number, key) for number, key in enumerate(KEYS, start=1)])
        units = algorithm.units(batch)
        teacher = [array(-2, -2)[: len(unit.words[0].actions)] for unit in units if unit.words]
        constants, _ = algorithm.constants(batch, units, precomputed(batch, teacher=teacher), {})
        nothing = {**constants, "weights": [0 * one for one in constants["weights"]]}
        assert algorithm.size(units, nothing) == algorithm.size(units, constants) > 0


def test_ratings_of_one_key_share_its_bound_by_hand():
    """Six downs of one key and one each of four, all of two tokens and at the same margin: of 6 : 1 : 1 : 1 : 1 it
    keeps c = 0.3 (c + 4), 12/7, so that each of its six weighs 2/7."""
    batch = rows_batch([rated(number, key) for number, key in enumerate(KEYS, start=1)])
    algorithm = KTO(KTOConfig())
    units = algorithm.units(batch)
    constants, _ = algorithm.constants(batch, units, precomputed(batch), {})
    bounded, figures = bound_shares(constants, keys_of(batch, units), SHARE)
    found = [float(one[0]) for one in bounded["weights"]]
    assert found[:10] == pytest.approx([2 / 7] * 6 + [1] * 4)
    assert found[10:] == [1] * 10, "mismatched pairs, which are only looked at"
    assert figures == {"largest_key_share": pytest.approx(0.6)}


def test_a_key_whose_preferences_contradict_the_policy_pulls_more_and_is_bounded_by_that():
    """β Δ is 0.1 · (±10): σ(1) = 0.73 pulls at the pair that the policy prefers the other way round, and
    σ(−1) = 0.27 at the other."""
    batch = rows_batch([preferred(1, "contrary"), preferred(2, "agrees")])
    algorithm = DPO(DPOConfig(beta=0.1))
    units = algorithm.units(batch)
    reference = [array(-5, -5)] * 4
    sign = {
        place: sign
        for unit, sign in zip(units, (-1, 1), strict=True)
        for place, sign in zip(unit.members, (sign, -sign), strict=True)
    }
    proximal = [array(-5 + 2.5 * sign[place], -5 + 2.5 * sign[place]) for place in range(4)]
    constants, _ = algorithm.constants(batch, units, precomputed(batch, reference=reference, proximal=proximal), {})
    bounded, figures = bound_shares(constants, keys_of(batch, units), 0.5)
    steep, flat = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))
    assert figures == {"largest_key_share": pytest.approx(steep)}
    assert [float(one[0]) for one in bounded["weights"]] == pytest.approx([flat / steep] * 2 + [1] * 2)


def test_a_best_run_over_a_worst_one_is_the_key_s_that_praised_the_best():
    rows = [
        replace(row(n, "task", str(n), r), signals=said("reward", k, value=r))
        for n, r, k in ((1, 1.0, "ann"), (2, 0.0, "bea"))
    ]
    batch = rows_batch(rows)
    units = DPO(DPOConfig(best_over_worst=True)).units(batch)
    assert keys_of(batch, units) == {0: "ann", 1: "ann"}
