"""Preferences teach the same where a model computes one sequence a row: each reply is scored as if it were alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shared.experience import Other, Tokens
from tests.integration.test_update import build
from tests.support import architectures
from tests.support.batches import rows_batch
from tests.support.experiences import make_experiences
from tests.support.models import make_tiny_model
from trainer_service.packing import Rows


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_a_policy_that_is_still_the_base_model_prefers_neither_reply(name, tmp_path):
    base = make_tiny_model(tmp_path / "base")
    architectures.make(name, vocabulary=208).save_pretrained(base)
    preferred = []
    for number, row in enumerate(make_experiences(base, 4)):
        worse = np.arange(9 + number, 12 + 2 * number, dtype=np.int32)
        tokens = Tokens(row.tokens.prompt_ids, worse, np.full(len(worse), -1.0, np.float32))
        preferred.append(replace(row, preferred_over=(Other(f"other-{number}", tokens, row.sampling),)))
    one_step = {"epochs": 1, "minibatches": 1, "dpo": {"beta": 1.0}}
    update, _ = build(tmp_path, base, algorithm="dpo", **one_step)
    assert update.rows is Rows.SINGLE
    stats = update.update(rows_batch(preferred), step=0, version=0)
    assert stats["preferences"] == 4
    assert stats["margin"] == pytest.approx(0, abs=1e-4)
    assert stats["preference_loss"] == pytest.approx(np.log(2), abs=1e-4)
