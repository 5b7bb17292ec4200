"""A saved state: the same bits go on, under any ZeRO stage; a state of another model is refused."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import weakref
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.trainer import build_update, resumed
from shared.errors import ConfigError, DiskFull, FlywheelError
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.stop_request import StopRequest
from shared.versions import version_path
from tests.support.batches import ALONE
from tests.support.experiences import make_experiences, trainer_config
from tests.support.forms import FULL
from tests.support.models import make_tiny_model, publish_base
from trainer_service.learner import Learner
from trainer_service.loop import Trainer
from trainer_service.ranks import join_ranks
from trainer_service.resume import SavedState, StateStore
from trainer_service.state_files import require_same_critic

OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
EVERYTHING_PARTITIONED = {"stage3_param_persistence_threshold": 0}
SETUPS = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3 partitioned": {"stage": 3, **EVERYTHING_PARTITIONED},
    "2 offloaded": {"stage": 2, **OFFLOADED},
    "3 offloaded": {"stage": 3, **OFFLOADED, **EVERYTHING_PARTITIONED},
}
ALL = list(product(SETUPS, ["float32", "bf16"]))
KEPT = {"AdamW": "exp_avg, exp_avg_sq", "SGD": "momentum_buffer", "RMSprop": "momentum_buffer, square_avg"}
SOME = [("0", "float32"), ("2 offloaded", "bf16"), ("3 partitioned", "float32")]


@pytest.fixture(scope="module")
def rows(model):
    return make_experiences(model, 24)


@contextlib.contextmanager
def learner_of(root: Path, model: Path, zero: dict[str, object], optimizer: dict[str, object] | None = None, **trainer):
    deepspeed = {"zero_optimization": zero} | ({} if optimizer is None else {"optimizer": optimizer})
    config = trainer_config(root, model, deepspeed=deepspeed, **trainer)
    base, ranks = publish_base(config), join_ranks(60)
    with contextlib.closing(StateStore(config.root, "trainer")) as states:
        yield Learner(lambda: build_update(config, base, ranks), ranks, states)


def everything(learner: Learner) -> dict[str, torch.Tensor]:
    """Master weights and moments."""
    state, parameters = learner.backend.state, learner.backend.trained_parameters()
    kinds = [None, *state.moments()]
    return {f"{name} {kind}": state.read(p, kind).clone() for name, p in parameters.items() for kind in kinds}


def train(learner: Learner, rows, *batches: int) -> None:
    for number in batches:
        learner.train(rows[8 * number : 8 * number + 8], step=number, version=number, ahead=0)


@pytest.mark.parametrize(("setup", "precision"), ALL if FULL else SOME)
def test_a_trainer_that_starts_again_goes_on_with_the_same_bits(setup, precision, tmp_path, model, rows):
    with learner_of(tmp_path, model, SETUPS[setup], precision=precision) as learner:
        train(learner, rows, 0, 1)
        saved = learner.save(1)
        train(learner, rows, 2)
        expected = everything(learner)
    with learner_of(tmp_path, model, SETUPS[setup], precision=precision) as learner:
        learner.load(saved)
        train(learner, rows, 2)
        found = everything(learner)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("before", "after"), [("0", "3 partitioned"), ("2 offloaded", "0")])
def test_another_zero_stage_goes_on_from_a_saved_state(before, after, tmp_path, model, rows):
    with learner_of(tmp_path, model, SETUPS[before]) as learner:
        train(learner, rows, 0, 1)
        saved, held = learner.save(1), everything(learner)
        train(learner, rows, 2)
        expected = everything(learner)
    with learner_of(tmp_path, model, SETUPS[after]) as learner:
        learner.load(saved)
        assert all(torch.equal(tensor, held[name]) for name, tensor in everything(learner).items())
        train(learner, rows, 2)
        for name, tensor in everything(learner).items():
            assert torch.allclose(tensor, expected[name], atol=2e-5), name


def test_under_zero_3_no_weights_stay_in_memory_when_the_models_are_made_anew(tmp_path, model, rows):
    with learner_of(tmp_path, model, SETUPS["3 partitioned"]) as learner:
        train(learner, rows, 0)
        held = [weakref.ref(p.ds_tensor) for p in learner.backend.module.parameters()]
        held += [weakref.ref(flat) for flat in learner.backend._engine.optimizer.fp32_partitioned_groups_flat]
        learner.restore()
        assert all(one() is None for one in held)


def test_a_state_holds_twelve_bytes_for_each_trained_weight(tmp_path, model, rows):
    with learner_of(tmp_path, model, {"stage": 0}) as learner:
        train(learner, rows, 0)
        folder = tmp_path / learner.save(1).path
        trained = sum(p.numel() for p in learner.backend.trained_parameters().values())
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert 12 * trained < size < 12.5 * trained


def test_the_schedule_of_the_learning_rate_goes_on(tmp_path, model, rows):
    params = {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 100}
    schedule = {"scheduler": {"type": "WarmupLR", "params": params}}

    @contextlib.contextmanager
    def begin():
        config = trainer_config(tmp_path, model, deepspeed=schedule)
        base, ranks = publish_base(config), join_ranks(60)
        with contextlib.closing(StateStore(config.root, "trainer")) as states:
            yield Learner(lambda: build_update(config, base, ranks), ranks, states)

    with begin() as learner:
        train(learner, rows, 0)
        saved, progress = learner.save(1), learner.backend.state.progress()
    with begin() as learner:
        assert learner.backend.state.progress() != progress
        learner.load(saved)
        assert learner.backend.state.progress() == progress


@pytest.fixture(scope="module")
def with_state(tmp_path_factory, model, rows) -> tuple[Path, str]:
    """A root folder, and where in it a state is."""
    root = tmp_path_factory.mktemp("saved")
    with learner_of(root, model, {"stage": 0}) as learner:
        train(learner, rows, 0)
        return root, learner.save(1).path


@pytest.fixture
def saved(tmp_path, with_state) -> tuple[Path, SavedState]:
    root, path = with_state
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    return tmp_path / path, SavedState(path, None)


def refusal(root: Path, model: Path, state: SavedState) -> str:
    with learner_of(root, model, {"stage": 0}) as learner, pytest.raises(FlywheelError) as caught:
        learner.load(state)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == (2 if "of another model" in str(caught.value) else 1), "2: a restart is no help"
    return str(caught.value)


def test_a_state_of_another_model_is_refused_with_the_first_weight_that_differs(tmp_path, saved):
    folder, state = saved
    other = make_tiny_model(tmp_path / "other", tied=False)
    shutil.copytree(folder, tmp_path / "second" / state.path)
    assert (
        "is of another model or algorithm: 'policy.lm_head.weight' is not in it, and F32 [208, 64] in the model"
        in refusal(tmp_path / "second", other, state)
    )


@pytest.mark.parametrize(("one", "other"), [("AdamW", "SGD"), ("SGD", "RMSprop")])
def test_a_state_of_another_optimizer_is_refused_with_what_each_keeps(one, other, tmp_path, model, rows):
    first, second = ({"type": kind, "params": {"momentum": 0.9} if kind != "AdamW" else {}} for kind in (one, other))
    with learner_of(tmp_path, model, {"stage": 0}, first) as learner:
        train(learner, rows, 0)
        state = learner.save(1)
    expected = f"has {KEPT[one]} for each weight, and trainer.deepspeed.optimizer keeps {KEPT[other]};"
    with learner_of(tmp_path, model, {"stage": 0}, second) as learner, pytest.raises(ConfigError, match=expected):
        learner.load(state)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: (folder / "state.json").unlink(), "set another trainer.name: it begins at the newest version"),
        (lambda folder: (folder / "state.json").write_text("{"), "cannot be loaded"),
        (lambda folder: (folder / "exp_avg.safetensors").write_bytes(b"x" * 20), "cannot be loaded"),
        (lambda folder: (folder / "master.safetensors").unlink(), "cannot be loaded"),
        (shutil.rmtree, "cannot be loaded"),
    ],
)
def test_a_damaged_state_is_refused_in_one_line(damage, expected, tmp_path, model, saved):
    folder, state = saved
    damage(folder)
    line = refusal(tmp_path, model, state)
    assert expected in line and str(folder) in line


def test_a_state_of_a_newer_form_is_refused(tmp_path, model, saved):
    folder, state = saved
    about = json.loads((folder / "state.json").read_text()) | {"format": 2}
    (folder / "state.json").write_text(json.dumps(about))
    assert "is of a newer Flywheel" in refusal(tmp_path, model, state)


def test_a_state_that_cannot_be_written_leaves_nothing_behind(tmp_path, model, rows, monkeypatch):
    with learner_of(tmp_path, model, {"stage": 0}) as learner:
        train(learner, rows, 0)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("trainer_service.state_files.write_tensors", full)
        with pytest.raises(DiskFull, match="No space left on device"):
            learner.save(1)
    assert not list((tmp_path / "trainer/trainer").glob("state-*"))


def test_what_algorithms_remember_comes_back_to_the_bit(tmp_path, model, rows):
    mix = {"algorithms": {"ppo": 1.0, "reinforce_pp": 0.5}}
    with learner_of(tmp_path, model, {"stage": 0}, **mix) as learner:
        train(learner, rows, 0, 1)
        remembered, saved = copy.deepcopy(learner.memory), learner.save(1)
        train(learner, rows, 2)
        expected = learner.memory
    assert remembered != expected
    with learner_of(tmp_path, model, {"stage": 0}, **mix) as learner:
        learner.load(saved)
        assert learner.memory == remembered
        train(learner, rows, 2)
        assert learner.memory == expected
        learner.restore()
        assert learner.memory == remembered, "a failed update is forgotten"
    memory = tmp_path / saved.path / "memory.json"
    memory.write_text(memory.read_text().replace("1", "2"))
    assert "is not the one that was saved" in refusal(tmp_path, model, saved)


def test_after_a_failed_update_the_state_is_loaded_though_the_version_that_training_began_with_is_deleted(
    tmp_path, model, rows
):
    config = trainer_config(tmp_path, model)
    begun, ranks = shutil.copytree(publish_base(config), tmp_path / version_path(5)), join_ranks(60)
    build, again = (partial(build_update, config, one, ranks) for one in (begun, tmp_path / version_path(0)))
    with (
        contextlib.closing(StateStore(tmp_path, "trainer")) as states,
        contextlib.closing(Learner(build, ranks, states, build_for_state=again)) as learner,
    ):
        train(learner, rows, 0)
        learner.save(6)
        expected = everything(learner)
        shutil.rmtree(begun)
        learner.restore()
        found = everything(learner)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("saved_by", "now"), [("ppo", "grpo"), ("grpo", "ppo")])
def test_a_change_between_algorithms_with_and_without_a_critic_is_refused_before_models_are_loaded(
    tmp_path, saved_by, now
):
    folder = tmp_path / "state-000001"
    names = ["policy.lm_head.weight", *(["value_head.weight"] if saved_by == "ppo" else [])]
    tensors = {name: torch.zeros(2) for name in names}
    folder.mkdir()
    save_file(tensors, folder / "master.safetensors")
    settings = trainer_config(tmp_path, tmp_path, algorithm=now).trainer
    with pytest.raises(ConfigError) as caught:
        require_same_critic(folder, settings)
    a, b = ("with", "without") if saved_by == "ppo" else ("without", "with")
    assert f"was saved {a} a critic, and trainer.algorithm={now} trains {b} one" in str(caught.value)
    assert "set another trainer.name" in str(caught.value)
    require_same_critic(folder, settings.model_copy(update={"algorithm": saved_by}))
    require_same_critic(tmp_path / "not there", settings)


def test_a_trainer_that_is_set_from_ppo_to_grpo_says_so_before_it_builds_anything(tmp_path, model, monkeypatch):
    config = trainer_config(tmp_path / "data", model, algorithm="grpo")
    publish_base(config)
    with contextlib.closing(Ledger.open(config.ledger_url)) as ledger:
        state = tmp_path / "data/trainer/trainer/state-000000"
        state.mkdir(parents=True)
        save_file({"value_head.weight": torch.zeros(2)}, state / "master.safetensors")
        with ledger.write() as connection:
            about = {"step": 1, "version": 0, "state_path": "trainer/trainer/state-000000", "state_sha256": None}
            transitions.announce_trainer(connection, name="trainer", **about)
    monkeypatch.setattr("services.trainer.build_update", None)  # nothing is built
    with (
        pytest.raises(ConfigError, match="was saved with a critic"),
        resumed(config, ALONE, StopRequest(), Trainer),
    ):
        pass
