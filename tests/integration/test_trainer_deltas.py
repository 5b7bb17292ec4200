"""A trainer that publishes deltas, as a real process on a real ledger."""

from __future__ import annotations

import pytest

from shared.chain import copy_version, read_chain
from shared.versions import read_manifest
from tests.support.experiences import make_experiences
from tests.support.models import make_tiny_model
from tests.support.processes import wait_for
from tests.support.trained_roots import BATCH, LAST, ROWS, begin, finish, newest, prepare, weights


@pytest.fixture(scope="module")
def rows(model):
    return make_experiences(model, ROWS)


DELTAS = {"FLYWHEEL_VERSIONS__DELTA": "true", "FLYWHEEL_ENGINE__STAGING_DIR": "staged"}


def test_versions_that_are_published_as_deltas_have_the_bits_of_whole_ones_also_after_a_crash(tmp_path, lives, rows):
    model = make_tiny_model(tmp_path / "base", dtype="bfloat16")
    whole, deltas = tmp_path / "whole", tmp_path / "deltas"
    for root in (whole, deltas):
        root.mkdir()
        prepare(root, model, rows, learning_rate=1e-6)
        (root / "trainer.log").touch()
    finish(lives, whole)
    with begin(lives, deltas, **DELTAS, FAULT="after Learner.write_version", FAULT_CALL="2") as trainer:
        assert trainer.wait(240) == -9
    finish(lives, deltas, **DELTAS)
    forms = [read_manifest(deltas / f"versions/v{version:06d}").form for version in range(LAST + 1)]
    assert forms == ["whole", "delta", "whole", "delta", "delta", "delta"], "what was kept was not of the parent"
    for version in range(LAST + 1):
        (tmp_path / str(version)).mkdir()
        copy_version(read_chain(deltas, version), tmp_path / str(version))
        assert (tmp_path / str(version) / "model.safetensors").read_bytes() == weights(whole, version)


def test_a_trainer_without_a_state_begins_with_a_delta(tmp_path, lives, rows):
    model = make_tiny_model(tmp_path / "base", dtype="bfloat16")
    prepare(tmp_path, model, rows[:BATCH], learning_rate=1e-6)
    (tmp_path / "trainer.log").touch()
    with begin(lives, tmp_path, **DELTAS) as trainer:
        wait_for(lambda: newest(tmp_path) == 1, "the first version", 240)
        assert trainer.stop() == 0
    assert read_manifest(tmp_path / "versions/v000001").form == "delta"
    environ = {**DELTAS, "FLYWHEEL_TRAINER__NAME": "another"}
    with begin(lives, tmp_path, **environ) as trainer:
        wait_for(lambda: "at work" in (tmp_path / "trainer.log").read_text().split("stopped")[-1], "its start", 240)
        assert trainer.stop() == 0
