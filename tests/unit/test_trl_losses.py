"""Losses and gradients against TRL's own, which benchmarks/peers/trl_losses.py recorded (data/trl_losses.json).

What of ours corresponds to what of TRL's:

    dpo, clip 0                       DPOTrainer, sigmoid; with label_smoothing aot of one pair: conservative DPO
    kto, clip 0, largest_weight 1,
    taper false                       KTOTrainer; as there, z is that of the policy now, where our trainer takes that of
                                      the batch's beginning
    sft                               SFTTrainer, nll
    surrogate clip                    GRPOTrainer: mean sequences is grpo, tokens is bnpo and dapo, constant is dr_grpo;
                                      dual_clip is delta, importance_cap is vllm_importance_sampling_cap by token
    kl k3 in the loss                 beta, with use_bias_correction_kl off
    surrogate cispo, mean tokens      cispo, whose epsilon_high is our 1 + clip_high
    surrogate gspo, mean sequences    importance_sampling_level sequence
    hint's divergence                 SDPOTrainer, alpha 0: over all tokens, and over k of them with a tail
    distill, and hint with top_k 0    sampled_token
    rloo, mean constant               RLOOTrainer, at the policy that sampled

Where ours departs, TRL's is taken with what makes both alike: SDPO is a mean over sequences, ours over tokens, so all
have one length; its k tokens are the policy's likeliest, ours the teacher's, so both have the same here; sampled_token
has another loss than a surrogate, and the same gradient while nothing is clipped; GRPO multiplies its KL penalty by the
ratio to the old policy as a default, ours never; RLOO clips the ratio of whole sequences, ours of tokens, so the two
are alike where it is 1. Without a counterpart are the bound of dpo and kto on an update
(clip), and advantages: GRPO adds 1e-4 to a deviation, grpo nothing.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.config import DistillConfig, DPOConfig, GRPOConfig, KTOConfig, SFTConfig
from tests.support.batches import array, batch_of, loss_of, precomputed, sequence
from trainer_service.algorithms.distill import Distill
from trainer_service.algorithms.dpo import DPO
from trainer_service.algorithms.kto import KTO
from trainer_service.algorithms.seam import Batch, Now
from trainer_service.algorithms.sft import SFT
from trainer_service.algorithms.surrogates import (
    divergence_with_tail,
    importance_weights,
    policy_loss,
    policy_size,
)

RECORDED = json.loads((Path(__file__).parent / "data/trl_losses.json").read_text())
GIVEN, CASES = RECORDED["inputs"], RECORDED["cases"]
LENGTHS = [len(one) for one in GIVEN["policy"]]


def assert_as_trl(name: str, loss: Tensor, leaves: list[Tensor], *, gradient_alone: bool = False) -> None:
    loss.backward()
    theirs = CASES[name]
    assert gradient_alone or loss.item() == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-7)
    for leaf, gradient in zip(leaves, theirs["gradient"], strict=True):
        found = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        np.testing.assert_allclose(found.numpy(), gradient, rtol=1e-5, atol=1e-7)


def policy() -> list[Tensor]:
    return [torch.tensor(one, requires_grad=True) for one in GIVEN["policy"]]


def arrays(*names: str) -> list[np.ndarray]:
    return [array(*one) for name in names for one in GIVEN[name]]


def batch(**said: Any) -> Batch:
    return replace(batch_of(*(sequence([0.0] * length) for length in LENGTHS)), **said)


def test_the_numbers_are_those_of_the_version_that_the_benchmarks_compare_with():
    pinned = (Path(__file__).parents[2] / "requirements/peers.txt").read_text()
    assert f"\ntrl=={RECORDED['trl']}\n" in pinned


@pytest.mark.parametrize(
    ("name", "pairs", "smoothing"), [("dpo", [(0, 2), (1, 3)], 0.0), ("dpo smoothed", [(0, 2)], 0.1)]
)
def test_dpo_is_trl_s(name, pairs, smoothing):
    algorithm, logprobs = DPO(DPOConfig(beta=0.3, clip=0, label_smoothing=smoothing)), policy()
    said = batch(pairs=pairs)
    loss, _ = loss_of(algorithm, said, precomputed(said, reference=arrays("reference")), logprobs)
    assert_as_trl(name, loss, logprobs)


def test_kto_is_trl_s():
    algorithm, logprobs = KTO(KTOConfig(beta=0.4, clip=0, largest_weight=1.0, taper=False)), policy()
    said = batch(ratings={0: True, 1: True, 2: False, 3: False})
    seen = {"proximal": arrays("policy", "others"), "reference": arrays("reference", "others_reference")}
    loss, figures = loss_of(algorithm, said, precomputed(said, **seen), logprobs)
    assert figures["kl"] > 0
    assert_as_trl("kto", loss, logprobs)


def test_sft_is_trl_s():
    said, logprobs = batch(written=range(4)), policy()
    loss, _ = loss_of(SFT(SFTConfig()), said, precomputed(said), logprobs)
    assert_as_trl("sft", loss, logprobs)


def clip(name: str, *, proximal: str = "old", weighted: bool = False, gradient_alone=False, **settings: Any) -> None:
    """Compare a surrogate with advantages that are given."""
    config = GRPOConfig.model_validate({"clip": 0.2, "clip_high": 0.28, "dual_clip": None, "kl_coef": 0, **settings})
    logprobs, old = policy(), arrays(proximal)
    sampler = arrays("sampler") if weighted else old
    weights = [importance_weights(p - q, config) for p, q in zip(old, sampler, strict=True)]
    constants = {"proximal": old, "weights": weights, "advantages": spread(GIVEN["advantages"])}
    if config.mean != "tokens":
        constants["shares"] = spread([1 / (config.mean_tokens if config.mean == "constant" else n) for n in LENGTHS])
    if config.kl_coef:
        constants["reference"] = arrays("reference")
    flat = torch.cat(logprobs)
    owners = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))
    now = Now(flat, torch.zeros_like(flat), None, owners, torch.arange(4))
    loss, _ = policy_loss(now, {key: torch.from_numpy(np.concatenate(one)) for key, one in constants.items()}, config)
    assert_as_trl(name, loss / policy_size(constants, config), logprobs, gradient_alone=gradient_alone)


def spread(values: list[float]) -> list[np.ndarray]:
    """The same for each token of a sequence."""
    return [np.full(length, value, np.float32) for length, value in zip(LENGTHS, values, strict=True)]


def test_the_clipped_surrogate_and_its_means_are_those_of_grpo():
    clip("bnpo", mean="tokens")
    clip("dapo", mean="tokens")
    clip("grpo", mean="sequences")
    clip("dr_grpo", mean="constant", mean_tokens=64)


def test_the_kl_penalty_in_the_loss_is_that_of_grpo():
    clip("kl", kl_coef=0.5)


def test_the_dual_clip_is_grpo_s_delta():
    assert CASES["delta"] != CASES["bnpo"]
    clip("delta", dual_clip=1.5)


def test_weights_for_another_sampler_are_those_of_grpo():
    assert CASES["weights"] != CASES["bnpo"]
    clip("weights", weighted=True, importance_cap=GIVEN["cap"])


def test_the_gradient_of_rloo_at_the_policy_that_sampled_is_trl_s():
    clip("rloo", proximal="policy", gradient_alone=True, mean="constant", mean_tokens=1)


def test_cispo_and_gspo_are_trl_s():
    clip("cispo", surrogate="cispo", clip_high=0.5)
    clip("gspo", surrogate="gspo", mean="sequences")


@pytest.mark.parametrize(("name", "kept"), [("sdpo", 5), ("sdpo top", GIVEN["top"])])
def test_the_divergence_of_hint_is_that_of_sdpo(name, kept):
    """Of all tokens but one the rest is that one: the divergence over all of them."""
    logits = torch.tensor(GIVEN["student"], requires_grad=True)
    teacher = torch.tensor(GIVEN["teacher"]).log_softmax(-1)
    likeliest = teacher.topk(kept).indices
    gaps = divergence_with_tail(teacher.gather(-1, likeliest), logits.log_softmax(-1).gather(-1, likeliest))
    loss = gaps.mean()
    loss.backward()
    assert loss.item() == pytest.approx(CASES[name]["loss"], rel=1e-5)
    np.testing.assert_allclose(logits.grad.numpy(), CASES[name]["gradient"], rtol=1e-4, atol=1e-6)


def test_the_gradient_of_a_teacher_s_opinion_of_sampled_tokens_is_that_of_sdpo():
    logits, sampled = torch.tensor(GIVEN["student"], requires_grad=True), torch.tensor(GIVEN["sampled"])
    said, teacher = (
        one.log_softmax(-1).gather(-1, sampled[..., None]).squeeze(-1)
        for one in (logits, torch.tensor(GIVEN["teacher"]))
    )
    algorithm, taught = Distill(DistillConfig(path="x", kl_coef=0)), batch_of(*(sequence([0.0] * 3) for _ in range(2)))
    proximal = list(said.detach().numpy())
    seen = precomputed(taught, proximal=proximal, processed=proximal, teacher=list(teacher.numpy()))
    assert (teacher - said).abs().max() < algorithm.config.advantage_bound
    behaviour = [replace(one, behaviour=p) for one, p in zip(taught.sequences, proximal, strict=True)]
    loss, _ = loss_of(algorithm, replace(taught, sequences=behaviour), seen, list(said))
    loss.backward()
    np.testing.assert_allclose(logits.grad.numpy(), CASES["sdpo sampled"]["gradient"], rtol=1e-4, atol=1e-6)
