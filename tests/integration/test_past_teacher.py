"""Teachers of `hint` that are earlier policies: against float64, and the same bits after a restart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from services.trainer import build_update
from shared.config import HintConfig
from shared.errors import DiskFull
from shared.experience import Experience
from shared.ledger.connect import Ledger
from shared.reward import Signal
from shared.versions import version_path
from tests.support.experiences import make_experiences, trainer_config
from tests.support.forms import FULL
from trainer_service import past_policy
from trainer_service.base_version import ensure_base_version
from trainer_service.batch import make_batch
from trainer_service.learner import Learner
from trainer_service.ranks import join_ranks
from trainer_service.resume import StateStore

DECAY, BLOCK = 0.75, np.array([7, 8, 9], np.int32)
KINDS = {"full": None, "lora": {"rank": 4}}


@pytest.fixture(scope="module")
def rows(model) -> list[Experience]:
    """Each with a block of words before it."""
    return [replace(row, hint=BLOCK) for row in make_experiences(model, 32)]


@contextlib.contextmanager
def learner_of(root: Path, model: Path, kind: str, teacher: str, **more: Any) -> Iterator[Learner]:
    hint: dict[str, Any] = {"teacher": teacher, "neutral_reward": None, "least_effect": 0.0}
    hint |= {"teacher_decay": DECAY} if teacher == "average" else {}
    config = trainer_config(root, model, KINDS[kind], algorithm="hint", hint=hint, **more)
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
        ensure_base_version(config, ledger)
    start, ranks = config.root / version_path(0), join_ranks(60)
    with contextlib.closing(StateStore(config.root, "trainer")) as states:
        yield Learner(lambda: build_update(config, start, ranks), ranks, states)


def train(learner: Learner, rows: list[Experience], number: int) -> dict[str, float]:
    return learner.train(rows[8 * number : 8 * number + 8], step=number, version=number)


def own(learner: Learner) -> dict[str, torch.Tensor]:
    """The policy's trained weights, in float64."""
    return {name: learner.backend.whole(p).double() for name, p in learner.backend.trained_parameters().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_average_is_that_of_all_updates_so_far(kind, tmp_path, model, rows):
    with learner_of(tmp_path, model, kind, "average") as learner:
        expected = own(learner)
        for number in range(3):
            train(learner, rows, number)
            now = own(learner)
            expected = {name: DECAY * one + (1 - DECAY) * now[name] for name, one in expected.items()}
        held = learner._update.past.weights
        assert held.keys() == expected.keys()
        for name, one in expected.items():
            torch.testing.assert_close(held[name].double(), one, rtol=1e-5, atol=1e-7)


def test_the_teacher_reads_the_words_with_the_earlier_weights_and_the_policy_keeps_its_own(tmp_path, model, rows):
    with learner_of(tmp_path, model, "full", "version") as learner:
        train(learner, rows, 0)
        before = own(learner)
        update, batch = learner._update, make_batch(rows[8:16])
        (part,) = update._parts.values()
        scored = update._precompute.run(batch, {"hint": (part.algorithm, part.algorithm.units(batch))})
        taught = scored.of_part["hint"]["teacher"]
        assert all(torch.equal(one, before[name]) for name, one in own(learner).items())
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    for row, found in zip(rows[8:16], taught, strict=True):
        ids = np.concatenate([BLOCK, row.tokens.prompt_ids, row.tokens.reply_ids]).astype(np.int64)
        with torch.no_grad():
            logprobs = base(torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
        reply = len(row.tokens.reply_ids)
        said = logprobs[-reply - 1 : -1].gather(-1, torch.from_numpy(ids[-reply:])[:, None])[:, 0]
        assert found == pytest.approx(said.numpy(), abs=2e-5)


def test_what_teaches_is_the_version_that_was_written_last(tmp_path, model, rows):
    with learner_of(tmp_path, model, "full", "version") as learner:
        first = own(learner)
        train(learner, rows, 0)
        assert all(torch.equal(one.double(), first[name]) for name, one in learner._update.past.weights.items())
        learner.write_version(tmp_path, version=1, parent=0, step=1)
        now = own(learner)
        assert all(torch.equal(one.double(), now[name]) for name, one in learner._update.past.weights.items())
        assert any(not torch.equal(one, first[name]) for name, one in now.items())


@pytest.mark.parametrize(
    ("kind", "teacher"),
    list(product(KINDS, ("average", "version"))) if FULL else [("full", "average"), ("lora", "version")],
)
def test_a_trainer_that_starts_again_goes_on_to_the_same_bits(kind, teacher, tmp_path, model, rows):
    with learner_of(tmp_path / "a", model, kind, teacher) as learner:
        train(learner, rows, 0)
        train(learner, rows, 1)
        learner.write_version(tmp_path / "a", version=1, parent=0, step=1)
        saved = learner.save(1)
        train(learner, rows, 2)
        undisturbed, taught = own(learner), dict(learner._update.past.weights)
    with learner_of(tmp_path / "a", model, kind, teacher) as learner:
        learner.load(saved)
        train(learner, rows, 2)
        assert all(torch.equal(one, undisturbed[name]) for name, one in own(learner).items())
        assert all(torch.equal(one, taught[name]) for name, one in learner._update.past.weights.items())
        train(learner, rows, 3)
        learner.restore()
        train(learner, rows, 2)
        assert all(torch.equal(one, undisturbed[name]) for name, one in own(learner).items())


def test_a_state_of_a_live_teacher_begins_the_average_with_the_policy(tmp_path, model, rows):
    with learner_of(tmp_path, model, "full", "live") as learner:
        train(learner, rows, 0)
        saved = learner.save(1)
        policy = own(learner)
    with learner_of(tmp_path, model, "full", "average") as learner:
        learner.load(saved)
        assert all(torch.equal(one.double(), policy[name]) for name, one in learner._update.past.weights.items())


def test_a_rehearsed_row_is_learnt_as_a_new_one_is_to_the_same_bits(tmp_path, model, rows):
    said = [replace(row, signals=(Signal("comment", text="shorter"),), run_id=None, task_id=None) for row in rows[:8]]
    learnt, figures = [], []
    for again in (False, True):
        mixed = [*said[:5], *(replace(row, is_rehearsal=again) for row in said[5:])]
        with learner_of(tmp_path / str(again), model, "full", "live", epochs=2, minibatches=2) as learner:
            figures.append(learner.train(mixed, step=0, version=0))
            learnt.append(own(learner))
    assert all(torch.equal(one, learnt[1][name]) for name, one in learnt[0].items())
    assert [(one["hints"], one["rows"], one.get("rehearsed")) for one in figures] == [(8, 8, None), (8, 5, 3)]


def test_a_decay_without_an_average_is_refused():
    with pytest.raises(ValueError, match="teacher_decay"):
        HintConfig(teacher="live", teacher_decay=0.9).check_in_use("trainer.hint")


def test_the_teachers_likeliest_tokens_are_learnt_and_their_divergence_falls(tmp_path, model, rows):
    hint = {"teacher": "version", "top_k": 8, "neutral_reward": None, "least_effect": 0.0, "kl_coef": 0.0}
    config = trainer_config(tmp_path, model, algorithm="hint", hint=hint)
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
        ensure_base_version(config, ledger)
    ranks = join_ranks(60)
    learner = Learner(lambda: build_update(config, config.root / version_path(0), ranks), ranks)
    found = [learner.train(rows[:8], step=step, version=step)["kl_to_teacher"] for step in range(6)]
    assert 0 < found[-1] < 0.5 * found[0]


def test_a_disk_that_is_full_when_the_average_is_written_is_a_full_disk_and_leaves_no_state(
    tmp_path, model, monkeypatch
):
    def full(*_: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(past_policy, "save_file", full)
    with learner_of(tmp_path, model, "lora", "average") as learner, pytest.raises(DiskFull, match="free space there"):
        learner.save(0)
    assert not list(tmp_path.glob("trainer/trainer/state-*"))
