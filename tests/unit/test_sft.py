"""Supervised fine-tuning: written answers are learnt, whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shared.config import SFTConfig
from tests.support.batches import batch_of, loss_of, precomputed, sequence
from trainer_service.algorithms.seam import Needs, Said, Unit
from trainer_service.algorithms.sft import SFT

ALGORITHM = SFT(SFTConfig())


def test_it_needs_no_look():
    assert ALGORITHM.needs == Needs.NOTHING


def test_sampled_replies_are_not_learnt_whatever_their_reward():
    assert ALGORITHM.units(batch_of(sequence([0, 1.0]), sequence([0, -1.0]))) == []


def test_the_loss_is_the_mean_negative_log_likelihood_of_the_tokens_of_written_answers():
    batch = batch_of(sequence([0, 1.0]), sequence([0.0]), sequence([2.0]))
    batch = replace(batch, written=[0, 2])
    assert ALGORITHM.units(batch) == [Unit((0,), said=Said.ANSWER), Unit((2,), said=Said.ANSWER)]
    logprobs = [torch.tensor(values, requires_grad=True) for values in ([-1.0, -2.0], [-9.0], [-6.0])]
    loss, figures = loss_of(ALGORITHM, batch, precomputed(batch), logprobs)
    loss.backward()
    assert loss.item() == pytest.approx(3)
    assert logprobs[0].grad.tolist() == pytest.approx([-1 / 3, -1 / 3])
    assert logprobs[1].grad is None
    assert figures == {"learnt_tokens": 3, "negative_log_likelihood": pytest.approx(3)}
