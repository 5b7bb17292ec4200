"""What Trinity does with keys that are missing, replaced by others or ignored is what the converted file says."""

from __future__ import annotations

import pytest

from services.trinity.convert import Conversion, convert
from services.trinity.key import Fate, Given
from shared.config import Config
from trainer_service.algorithms.raft import RAFT

MODEL = {"model.model_path": "/m"}
ARGS = "algorithm.policy_loss_fn_args."
MODE = "algorithm.loss_agg_mode"
VERL = "trainer.trainer_config."
ACTOR = VERL + "actor_rollout_ref.actor."
SELECTOR = "buffer.explorer_input.taskset.task_selector.selector_type"


def converted(**keys: object) -> Conversion:
    return convert(Given({**MODEL, "algorithm.algorithm_type": "grpo", **keys}))


@pytest.mark.parametrize(
    ("keys", "rate"),
    [
        ({}, 1e-6),
        ({"algorithm.optimizer.lr": 3e-5}, 3e-5),
        ({f"{ACTOR}optim.lr": 2e-5}, 2e-5),
    ],
)
def test_an_adapter_learns_at_trinity_s_rate(keys, rate):
    done = converted(**{"model.lora_configs.0.lora_rank": 16, **keys})
    assert done.settings["trainer.learning_rate"] == rate
    remark = "trainer.learning_rate is 1e-06: Trinity's default, where ours is another"
    assert (remark in done.remarks) == (not keys)


def test_without_an_adapter_the_rate_is_the_same_and_not_written():
    assert "trainer.learning_rate" not in converted().settings


@pytest.mark.parametrize(
    ("keys", "mean"),
    [
        ({"algorithm.algorithm_type": "gspo"}, None),
        ({"algorithm.algorithm_type": "gspo", MODE: "seq-mean-token-mean"}, "sequences"),
        ({"algorithm.algorithm_type": "gspo", ARGS + "clip_range": 1e-4}, "sequences"),
        ({ARGS + "loss_agg_mode": "seq-mean-token-mean"}, None),
        ({ARGS + "loss_agg_mode": "token-mean", MODE: "seq-mean-token-mean"}, "sequences"),
        ({ARGS + "loss_agg_mode": "seq-mean-token-sum", MODE: "token-mean"}, "tokens"),
    ],
)
def test_the_loss_averages_over_what_trinity_s_does(keys, mean):
    """Trinity replaces the arguments' mode by the algorithm's; arguments without one have the loss's own."""
    done = converted(**keys)
    assert done.settings.get("trainer.grpo.mean") == mean and not done.lost


def test_one_range_of_gspo_is_the_range_to_both_sides():
    settings = converted(**{"algorithm.algorithm_type": "gspo", ARGS + "clip_range": 1e-3}).settings
    assert settings["trainer.grpo.clip"] == 1e-3 and "trainer.grpo.clip_high" not in settings


def test_a_mode_that_trinity_s_policy_loss_does_not_read_is_marked():
    (line,) = converted(**{ARGS + "clip_range": 0.2, MODE: "seq-mean-token-mean"}).lost
    assert line.key == MODE and "token-mean" in line.remark and "policy_loss_fn_args" in line.remark


@pytest.mark.parametrize(("steps", "every", "versions"), [(8, 4, 2), (9, 4, 2), (2, 4, 1), (3, 1, 3)])
def test_staleness_counts_versions_and_trinity_s_counts_steps(steps, every, versions):
    keys = {"algorithm.sample_strategy_args.max_staleness": steps, "synchronizer.sync_interval": every}
    assert converted(**keys).settings["trainer.max_staleness_versions"] == versions


@pytest.mark.parametrize(("order", "marked"), [("sequential", [SELECTOR]), ("shuffle", [])])
def test_an_order_of_tasks_that_learn_does_not_keep_is_marked(order, marked):
    tasks = {"buffer.explorer_input.taskset.path": "tasks.jsonl", SELECTOR: order}
    assert [line.key for line in converted(**tasks).lost] == marked


@pytest.mark.parametrize("mode", ["train", "bench"])
def test_an_order_of_tasks_from_which_nothing_is_learned_is_not_marked(mode):
    tasks = {"buffer.explorer_input.taskset.path": "tasks.jsonl", SELECTOR: "sequential", "mode": mode}
    assert SELECTOR not in [line.key for line in converted(**tasks).lost]


def test_the_order_of_tasks_is_told_if_the_file_names_none():
    tasks = {"buffer.explorer_input.taskset.path": "tasks.jsonl"}
    for keys, is_told in ((tasks, True), ({**tasks, SELECTOR: "random"}, False)):
        assert any("learn draws a new order" in one for one in converted(**keys).remarks) is is_told


def test_the_order_of_held_out_tasks_is_not_marked():
    held_out = "buffer.explorer_input.eval_tasksets.0.task_selector.selector_type"
    assert not converted(**{"buffer.explorer_input.taskset.path": "tasks.jsonl", held_out: "sequential"}).lost


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (ACTOR + "ppo_mini_batch_size", 64),
        (ACTOR + "clip_ratio", 0.1),
        (ACTOR + "clip_ratio_low", 0.1),
        (ACTOR + "clip_ratio_high", 0.3),
        (ACTOR + "entropy_coeff", 0.01),
        (ACTOR + "grad_clip", 0.5),
        (VERL + "critic.ppo_mini_batch_size", 64),
        (VERL + "critic.grad_clip", 0.5),
        (VERL + "algorithm.gamma", 0.9),
        (VERL + "algorithm.lam", 0.95),
        (VERL + "trainer.critic_warmup", 20),
    ],
)
@pytest.mark.parametrize("rows", [{"buffer.train_batch_size": 256}, {"data.batch_size": 256}], ids=["new", "old"])
def test_a_key_of_verl_that_trinity_ignores_sets_nothing(rows, key, value):
    kind = {**rows, "algorithm.algorithm_type": "ppo"}
    done = converted(**kind, **{key: value})
    assert done.settings == converted(**kind).settings
    (line,) = [line for line in done.lines if line.key == key]
    assert line.fate is Fate.NOT_NEEDED and line.remark.startswith("Trinity ignores it")


def test_keys_of_verl_that_trinity_reads_are_settings():
    keys = {ACTOR + "ppo_epochs": 2, ACTOR + "optim.clip_grad": 0.5, VERL + "critic.cliprange_value": 0.3}
    settings = converted(**{"algorithm.algorithm_type": "ppo", **keys}).settings
    names = ("trainer.epochs", "trainer.max_grad_norm", "trainer.ppo.value_clip")
    assert [settings[name] for name in names] == [2, 0.5, 0.3]


@pytest.mark.parametrize("adapter", [{"name": "one"}, {"": None}, {"path": "/a"}, {"lora_rank": None}])
def test_an_adapter_without_a_size_is_an_adapter_of_trinity_s_size(adapter):
    keys = {f"model.lora_configs.0.{name}".rstrip("."): value for name, value in adapter.items()}
    settings = converted(**keys).settings
    assert [settings[f"model.{name}"] for name in ("kind", "lora.rank", "lora.alpha")] == ["lora", 32, 32]


@pytest.mark.parametrize(("algorithm", "entropy"), [("grpo", {"algorithm.entropy_loss_fn": "none"}), ("raft", {})])
def test_a_coefficient_of_an_entropy_that_trinity_does_not_compute_sets_nothing(algorithm, entropy):
    coefficient = {"algorithm.entropy_loss_fn_args.entropy_coef": 0.01}
    done = converted(**{"algorithm.algorithm_type": algorithm, **entropy, **coefficient})
    assert not any(path.endswith("entropy_coef") for path in done.settings) and not done.lost
    assert converted(**coefficient).settings["trainer.grpo.entropy_coef"] == 0.01


def test_every_rewarded_reply_is_learned_from_as_by_trinity_s_raft():
    config = Config.model_validate(converted(**{"algorithm.algorithm_type": "raft"}).flywheel())
    assert RAFT(config.trainer.raft)._are_good([1.0, 1.0, 0.0]) == [True, True, True]


TASK_SET = {"buffer.explorer_input.taskset.path": "tasks.jsonl"}
HELD_OUT = {"buffer.explorer_input.eval_tasksets.0.path": "held_out.jsonl"}


@pytest.mark.parametrize(
    ("keys", "path", "value"),
    [
        ({}, "learn.timeout_s", 1800),
        ({"explorer.max_timeout": 60}, "learn.timeout_s", 60),
        ({}, "learn.params.max_tokens", None),
        ({"model.max_model_len": 4096}, "learn.params.max_tokens", 2048),
        ({"model.max_model_len": 4096, "model.max_prompt_tokens": 1024}, "learn.params.max_tokens", 3072),
        ({"model.max_model_len": 4096, "model.max_response_tokens": 100}, "learn.params.max_tokens", 100),
        ({"algorithm.repeat_times": 8}, "trainer.batch_size", 8),
        ({"algorithm.repeat_times": 8, "buffer.train_batch_size": 64}, "trainer.batch_size", 64),
        ({}, "learn.eval_params.temperature", None),
        (HELD_OUT, "learn.eval_params.temperature", 1.0),
        ({**HELD_OUT, "model.temperature": 0.7}, "learn.eval_params.temperature", 0.7),
        ({**HELD_OUT, "model.max_model_len": 4096}, "learn.eval_params.max_tokens", 2048),
    ],
)
def test_a_task_set_gets_trinity_s_defaults_where_ours_differ(keys, path, value):
    assert converted(**TASK_SET, **keys).settings.get(path) == value
