"""A teacher from a folder, of another architecture than the policy: rows are such as both compute right."""

from __future__ import annotations

import pytest

from tests.integration.test_update import build
from tests.support import architectures
from tests.support.models import make_tiny_model
from trainer_service.packing import Rows


@pytest.mark.parametrize(("architecture", "rows"), [("llama", Rows.FOLDED), ("qwen3_5", Rows.SINGLE)])
def test_rows_are_those_that_policy_and_teacher_compute_right(architecture, rows, tmp_path):
    base = make_tiny_model(tmp_path / "base")
    architectures.make(architecture, vocabulary=208).save_pretrained(tmp_path / "teacher")
    update, _ = build(tmp_path, base, algorithm="distill", distill={"path": str(tmp_path / "teacher")})
    assert update.rows is rows
