"""The GPUs that Trinity leaves to its trainer are named, and are none of an engine's."""

from __future__ import annotations

import pytest

from services.trinity.convert import Conversion, convert
from services.trinity.key import Fate, Given
from shared.config import Config

ENGINES = {"explorer.rollout_model.engine_num": 2, "explorer.rollout_model.tensor_parallel_size": 2}
ONE_MACHINE = {"model.model_path": "/m", "cluster.node_num": 1, "cluster.gpu_per_node": 8}


def converted(**keys: object) -> Conversion:
    return convert(Given({**ONE_MACHINE, **keys}))


def gpus(done: Conversion) -> tuple[int, tuple[int, ...] | None, list[tuple[int, ...] | None]]:
    """The trainer's ranks and GPUs, and each engine's, as our own loader has them."""
    config = Config.model_validate(done.flywheel())
    return config.trainer.ranks, config.trainer.devices, [engine.devices for engine in config.explorer.engines]


def marked(done: Conversion) -> dict[str, str]:
    return {line.key: line.remark for line in done.lost}


def test_the_trainer_has_the_gpus_that_engines_leave():
    done = converted(**ENGINES)
    assert gpus(done) == (4, (4, 5, 6, 7), [(0, 1), (2, 3)]) and not done.lost
    (line,) = [line for line in done.lines if line.key == "cluster.gpu_per_node"]
    assert line.ours == "trainer.ranks, trainer.devices"


def test_without_a_number_of_engines_one_has_the_first_gpu():
    assert gpus(converted(**{"cluster.gpu_per_node": 2})) == (1, (1,), [None])


def test_gpus_of_auxiliary_models_are_not_the_trainer_s():
    models = {f"explorer.auxiliary_models.{n}.model_path": "/judge" for n in range(2)}
    size = {"explorer.auxiliary_models.1.tensor_parallel_size": 2}
    assert gpus(converted(**ENGINES, **models, **size)) == (1, (7,), [(0, 1), (2, 3)])


def test_a_trainer_without_engines_has_all_gpus():
    assert gpus(converted(mode="train"))[:2] == (8, tuple(range(8)))


@pytest.mark.parametrize("mode", ["serve", "explore", "bench"])
def test_where_no_trainer_runs_it_is_given_none(mode):
    done = converted(**ENGINES, mode=mode, **{"cluster.gpu_per_node": 4})
    assert gpus(done) == (1, None, [(0, 1), (2, 3)]) and not done.lost


def test_too_few_gpus_are_reported_with_a_remedy():
    done = converted(**ENGINES, **{"cluster.gpu_per_node": 4})
    assert marked(done) == {
        "cluster.gpu_per_node": "engines and auxiliary models take 4 of 4 GPUs, and trainer and engine e0 are both "
        "given GPU 0; make engine_num or tensor_parallel_size smaller, or start the trainer on another machine, with "
        "trainer.ranks and trainer.devices of that one"
    }


def test_several_machines_are_reported_with_a_remedy():
    done = converted(**ENGINES, **{"cluster.node_num": 2})
    assert marked(done) == {
        "cluster.node_num": "2 machines; ranks are on one: set trainer.ranks and trainer.devices to GPUs that no "
        "engine has, and let each engine's url name its machine"
    }
    assert gpus(done)[:2] == (1, None)


def test_engines_that_take_more_gpus_than_are_counted_are_marked():
    done = converted(**ENGINES, **{"explorer.rollout_model.pipeline_parallel_size": 2})
    assert list(marked(done)) == ["cluster.gpu_per_node"] and gpus(done)[:2] == (1, None)


def test_without_a_number_of_gpus_the_note_states_that_the_trainer_has_no_own_gpu():
    done = convert(Given({"model.model_path": "/m", **ENGINES}))
    assert any(remark.startswith("trainer.devices is not set") for remark in done.remarks)
    assert not any("trainer.devices" in remark for remark in converted(**ENGINES).remarks)


def test_an_engine_and_a_trainer_on_one_gpu_share_it():
    done = converted(mode="colocate", **{"cluster.gpu_per_node": 1})
    (line,) = [line for line in done.lines if line.key == "cluster.gpu_per_node"]
    assert line.fate is Fate.NOT_NEEDED and "engine.gpu_share" in line.remark


@pytest.mark.parametrize(("asked", "share"), [(None, 0.25), (0.9, 0.25), (0.2, 0.2)])
def test_an_engine_that_shares_its_gpu_with_the_trainer_takes_at_most_a_quarter(asked, share):
    alone = {"mode": "colocate", "cluster.gpu_per_node": 1}
    done = converted(**alone, **{"explorer.rollout_model.gpu_memory_utilization": asked})
    assert Config.model_validate(done.flywheel()).engine.gpu_share == share
