"""The trainer at an accelerator's limits: each architecture's rows, a row that does not fit, ranks without a GPU."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.experience import Tokens
from shared.ledger.queries import count_by_state, quarantined
from tests.gpu import ON_GPU
from tests.support import architectures
from tests.support.experiences import make_experiences
from tests.support.processes import Process, wait_for
from tests.support.trained_roots import open_ledger, prepare
from trainer_service.models import prepare as fold
from trainer_service.packing import Rows
from trainer_service.self_test import check_rows

pytestmark = ON_GPU


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", architectures.NAMES)
def test_the_self_test_chooses_rows_that_no_sequence_can_see_across(name, kind, caplog):
    model = architectures.make(name).to("cuda", kind)
    fold(model)
    rows = check_rows(model)
    assert rows in ({Rows.FOLDED} if name in architectures.PLAIN else {Rows.PACKED, Rows.SINGLE})
    assert "keeps its own" not in caplog.text, caplog.text
    assert ("one by one" in caplog.text) == (rows is Rows.SINGLE), caplog.text


def test_a_row_that_does_not_fit_the_memory_is_quarantined_and_all_others_are_trained(tmp_path, base):
    rows, bad, long = make_experiences(base, 64), 37, 400_000
    arrays = np.full(long, 5, np.int32), np.full(long, 6, np.int32), np.full(long, -1.0, np.float32)
    rows[bad] = replace(rows[bad], tokens=Tokens(*arrays))
    breaker = {"kl_of_update": None, "change_of_update": None}  # few rows move a small model far
    prepare(tmp_path, base, rows, max_trajectory_tokens=2 * long, breaker=breaker)
    limit = {"PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:0.01"}
    with Process(["trainer", "-c", str(tmp_path / "flywheel.yaml")], tmp_path / "trainer.log", **limit) as trainer:
        wait_for(lambda: states(tmp_path)["CONSUMED"] == 63 or not trainer.alive, "the rest", 200)
        assert trainer.stop() == 0, trainer.output()
    assert states(tmp_path)["CONSUMED"] == 63 and states(tmp_path)["DISCARDED"] == 1, trainer.output()
    with contextlib.closing(open_ledger(tmp_path)) as ledger, ledger.read() as connection:
        ((reason, count),) = quarantined(connection).items()
    assert count == 1 and "out of memory" in reason
    assert "Traceback" not in trainer.output()


def states(root: Path) -> dict[str, int]:
    with contextlib.closing(open_ledger(root)) as ledger, ledger.read() as connection:
        return count_by_state(connection)


def test_more_ranks_than_gpus_are_refused_in_one_line(tmp_path, base):
    found = torch.cuda.device_count()
    prepare(tmp_path, base, ranks=found + 1)
    with Process(["trainer", "-c", str(tmp_path / "flywheel.yaml")], tmp_path / "trainer.log") as trainer:
        assert trainer.wait(120) != 0
    assert f"trainer.ranks={found + 1}, but this trainer sees {found} GPUs; lower trainer.ranks" in trainer.output()
    assert "Traceback" not in trainer.output()
