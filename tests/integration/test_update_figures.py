"""Figures of a batch: what was not measured is absent, and a row is of use by what was said of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shared.config import SFTConfig
from shared.experience import Experience
from tests.support.batches import rows_batch
from tests.support.experiences import make_experiences
from tests.support.models import make_tiny_model
from trainer_service.algorithms.seam import Batch, Unit, Words, one_each
from trainer_service.algorithms.sft import SFT
from trainer_service.parts import Part, Work
from trainer_service.update import _stats


@pytest.fixture
def rows(tmp_path):
    return make_experiences(make_tiny_model(tmp_path / "base"), 8)


def unused(batch: Batch, units: list[Unit]) -> tuple[float, float]:
    """The rows of a batch, and those that these units do not learn from."""
    nothing = [np.zeros(0, np.float32)] * len(batch.sequences)
    used = Work(Part(SFT(SFTConfig())), units, {}, {}).rows(batch)
    stats = _stats(batch, nothing, used, version=0, ahead=0)
    return stats["rows"], stats["rows_unused"]


def in_one_sequence(turns: list[Experience]) -> list[Experience]:
    """Rows as the turns of one conversation: each prompt begins with all tokens before."""
    before, found = np.zeros(0, np.int32), []
    for row in turns:
        prompt = np.concatenate([before, row.tokens.prompt_ids])
        found.append(replace(row, conversation_id="c", tokens=replace(row.tokens, prompt_ids=prompt)))
        before = np.concatenate([prompt, row.tokens.reply_ids])
    return found


def test_a_row_whose_correction_is_learned_is_of_use(rows):
    written = np.array([5, 6, 2], np.int32)
    batch = rows_batch([replace(row, correction=written) if row.id % 4 == 0 else row for row in rows])
    assert unused(batch, one_each(batch.written)) == (8, 6)


def test_a_turn_without_words_is_of_no_use_to_what_learns_from_words_though_it_is_in_their_sequence(rows):
    """Of three turns in one sequence, one has words."""
    batch = rows_batch([replace(row, reward=None) for row in in_one_sequence(rows[:3])])
    assert [sequence.row_ids for sequence in batch.sequences] == [[1, 2, 3]]
    begin = batch.sequences[0].ends[0] + 1
    words = Words(np.array([5]), np.arange(begin, batch.sequences[0].ends[1] + 1))
    assert unused(batch, [Unit((0,), (words,))]) == (3, 2)
    assert unused(batch, [Unit((0,), (words,)), *one_each([0])]) == (3, 0)
    assert unused(batch, [Unit((0,), trained=False)]) == (3, 3)


def test_without_rewards_there_is_no_mean_of_them(rows):
    for given, is_there in ((rows, True), ([replace(r, reward=None, turn_reward=None) for r in rows], False)):
        batch = rows_batch(given)
        nothing = [np.zeros(0, np.float32)] * len(batch.sequences)
        assert ("reward_mean" in _stats(batch, nothing, set(), version=0, ahead=0)) is is_there
