"""What a trainer needs before it writes or loads a state: room for what the state takes, and a whole state."""

from __future__ import annotations

from safetensors.torch import load_file

from tests.attacks.test_trainer import BATCH, begin, newest, prepare, said
from tests.integration.test_state import learner_of, train
from tests.support.experiences import make_experiences
from tests.support.processes import wait_for
from trainer_service import resume
from trainer_service.ranks import Ranks


def test_before_its_first_state_a_trainer_needs_the_room_that_the_state_takes(tmp_path, lives, model):
    """12 bytes for each trained weight, beside the version."""
    weights = sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())
    prepare(tmp_path, model, make_experiences(model, BATCH), algorithm="reinforce_pp", min_free_disk_gb=0)
    files = sum(file.stat().st_size for file in model.iterdir())
    never = tmp_path / "never"
    with begin(lives, tmp_path, FREE_BYTES_WITHOUT=f"{never}:{files + 13 * weights}") as trainer:
        wait_for(lambda: newest(tmp_path) == 1 or "not publishing" in said(tmp_path), "a version or a warning", 240)
        assert trainer.stop() == 0
    assert "not publishing" not in said(tmp_path)


def test_a_state_is_checked_before_other_ranks_wait_for_it(tmp_path, model, monkeypatch):
    """They wait in a collective, whose time is limited; the check reads the whole state."""
    done: list[str] = []
    monkeypatch.setattr(Ranks, "order", lambda self, name, *_: done.append(name))
    digest = resume._digest
    monkeypatch.setattr(resume, "_digest", lambda folder: done.append("digest") or digest(folder))
    with learner_of(tmp_path, model, {"stage": 0}) as learner:
        train(learner, make_experiences(model, 4), 0)
        state = learner.save(1)
        done.clear()
        learner.load(state)
    assert done == ["digest", "join_load"]
