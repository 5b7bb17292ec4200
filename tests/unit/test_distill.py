"""Distillation, against numbers computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from shared.config import DistillConfig, TrainerConfig
from shared.experience import Experience, Sampling, Tokens
from shared.reward import Kind, Signal
from tests.support.batches import array, batch_of, loss_of, precomputed, rows_batch, sequence
from trainer_service.algorithms.distill import Distill
from trainer_service.algorithms.seam import Batch, Needs

FOLDER = {"path": "/models/teacher", "kl_coef": 0}
SERVER = {"url": "http://teacher:8000", "kl_coef": 0}


def test_a_teacher_in_a_folder_is_asked_in_the_look_and_one_behind_a_url_before_it():
    assert Distill(DistillConfig(**FOLDER)).needs == Needs.TEACHER | Needs.PROXIMAL
    assert Distill(DistillConfig(**SERVER)).needs == Needs.PROXIMAL


@pytest.mark.parametrize("where", [{}, {"path": "x", "url": "http://y"}])
def test_one_teacher_is_needed_where_it_is_used_and_nowhere_else(where):
    with pytest.raises(
        ValueError, match=r"trainer\.distill: (neither|both) of path and url (is|are) set; set one of them"
    ):
        TrainerConfig(algorithm="distill", distill=where)
    TrainerConfig(algorithm="ppo")


def test_all_sampled_sequences_are_units_or_those_that_the_server_scored():
    batch = batch_of(sequence([0]), sequence([0, 0]))
    batch.add(sequence([0]))  # written by somebody
    batch.taught[1] = array(-1, -1)
    assert [unit.members for unit in Distill(DistillConfig(**FOLDER)).units(batch)] == [(0,), (1,)]
    assert [unit.members for unit in Distill(DistillConfig(**SERVER)).units(batch)] == [(1,)]


@pytest.mark.parametrize("settings", [FOLDER, SERVER])
def test_loss_and_gradient_equal_numbers_computed_by_hand(settings):
    batch = batch_of(sequence([0, 0, 0], behaviour=[-1.5, -1, -1]))
    teacher = array(-0.5, -9.0, math.nan) if settings is SERVER else array(-0.5, -9.0, -1.0)
    batch.taught[0] = teacher
    logprobs = [torch.tensor([math.log(1.1) - 1, -1.0, -2.0], requires_grad=True)]
    algorithm = Distill(DistillConfig(**settings, advantage_bound=3.0))
    loss, figures = loss_of(algorithm, batch, precomputed(batch, teacher=[teacher]), logprobs)
    loss.backward()
    weight, count = math.exp(0.5), 2 if settings is SERVER else 3  # a token that was not scored counts for nothing
    assert loss.item() == pytest.approx((-weight * 1.1 * 0.5 + 3.0) / count)
    assert logprobs[0].grad.tolist() == pytest.approx([-weight * 1.1 * 0.5 / count, 3.0 / count, 0])
    assert figures["kl_to_teacher"] == pytest.approx((-0.5 + 8.0) / count)


def test_the_kl_penalty_draws_towards_the_base_model_as_well():
    batch = batch_of(sequence([0]))
    algorithm = Distill(DistillConfig(path="x", kl_coef=0.5))
    seen = precomputed(batch, teacher=[array(-0.5)], reference=[array(-1.4)])
    constants, _ = algorithm.constants(batch, algorithm.units(batch), seen, {})
    np.testing.assert_allclose(constants["advantages"][0], [0.5 - 0.5 * 0.4], rtol=1e-6)


def turn(number: int, prompt: list[int], *kinds: Kind, correction: list[int] | None = None) -> Experience:
    """A turn of a run, whose reply is two tokens. kinds: of the signals about it."""
    reply = np.array([10 * number, 10 * number + 1], np.int32)
    tokens = Tokens(np.array(prompt, np.int32), reply, -np.ones(2, np.float32))
    about = {"signals": tuple(Signal(kind) for kind in kinds), "teacher": None if kinds else array(-0.5, -0.5)}
    ids = None if correction is None else np.array(correction, np.int32)
    names = (number, f"m{number}", 0, None, "t", "1", "m1", 0, None, 0.0)
    return Experience(*names, tokens, Sampling(), **about, correction=ids)


@pytest.mark.parametrize("settings", [FOLDER, SERVER])
def test_the_answers_of_demonstrations_are_no_samples_of_the_policy(settings):
    algorithm = Distill(DistillConfig(**settings))
    shown = turn(1, [1], "demonstration"), turn(2, [1, 10, 11, 5], "demonstration")
    sampled = turn(3, [2, 3], correction=[7, 8])
    batch = rows_batch([*shown, replace(sampled, run_id="2")])
    assert len(batch.sequences[0].ends) == 2, "both demonstrations are one sequence"
    assert len(batch.written) == 3
    assert [batch.sequences[place].row_ids for (place,) in members_of(algorithm, batch)] == [[3]]


@pytest.mark.parametrize("settings", [FOLDER, SERVER])
def test_of_a_conversation_with_a_demonstration_the_sampled_turns_are_learned(settings):
    algorithm = Distill(DistillConfig(**settings))
    batch = rows_batch([turn(1, [1]), turn(2, [1, 10, 11, 5], "demonstration"), turn(3, [1, 10, 11, 5, 20, 21, 6])])
    assert members_of(algorithm, batch) == [(0,)] and len(batch.sequences[0].ends) == 3
    teacher = array(-0.5, -0.5, -9.0, -9.0, -0.5, -0.5)
    constants, figures = algorithm.constants(batch, algorithm.units(batch), precomputed(batch, teacher=[teacher]), {})
    assert constants["counts"][0].tolist() == [1, 1, 0, 0, 1, 1]
    assert figures["kl_to_teacher"] == pytest.approx(-0.5)


def members_of(algorithm: Distill, batch: Batch) -> list[tuple[int, ...]]:
    return [unit.members for unit in algorithm.units(batch)]
