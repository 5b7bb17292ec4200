"""Values that Trinity-RFT's keys may have by mistake, arguments of the engine, and keys that contradict one another."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from services import cli
from services.trinity import table
from services.trinity.convert import convert
from services.trinity.key import Fate, Given, expand
from shared.errors import ConfigError
from tests.support.forms import FULL
from tests.support.trinity_files import KINDS, as_yaml, converted

TASKS = "buffer.explorer_input."
EXTRA = "explorer.rollout_model.extra_engine_args."
MODEL = {"model.model_path": "/m"}
NAMES = sorted({name.replace("**", "x").replace("*", "0") for key in table.KEYS for name in expand(key.names)})
ODD = (0, -1, "", None, [], {}, True, False, 0.5, 10**400, 1e308, float("inf"), float("nan"), "text", [1], {"a": 1},
       date(2024, 1, 1), {"a"}, b"a", [b"a"])  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def lost(**keys: object) -> list[str]:
    """The keys that are marked as changing training."""
    return [line.key for line in convert(Given({**MODEL, **keys})).lost]


def test_several_passes_of_a_trainer_alone_are_lost():
    assert lost(**{"mode": "train", "buffer.total_epochs": 3}) == ["buffer.total_epochs"]
    assert not lost(**{"mode": "train", "buffer.total_epochs": 1})


def arguments(**extra: object) -> list[str]:
    return convert(Given({**MODEL, **{EXTRA + name: value for name, value in extra.items()}})).arguments


def exit_status(keys: dict[str, object]) -> int:
    Path("trinity.yaml").write_text(as_yaml(keys), encoding="utf-8")
    return cli.main(["convert-config", "trinity.yaml"])


def test_a_second_task_set_that_is_left_out_ends_with_1_and_is_marked(capsys):
    sets = [
        {"path": "a.jsonl", "rollout_args": {"temperature": 1.0}},
        {"path": "b.jsonl", "rollout_args": {"temperature": 0.5}},
    ]
    assert exit_status({**MODEL, "mode": "both", f"{TASKS}tasksets": sets}) == 1
    said = capsys.readouterr().out
    assert f"! {TASKS}tasksets.1.path " in said and "write the rows of both into one file" in said
    assert f"! {TASKS}tasksets.1.rollout_args.temperature " in said


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("buffer.total_epochs", "data.total_epochs"),
        ("algorithm.repeat_times", "explorer.repeat_times"),
        ("model.max_model_len", "model.max_token_len"),
        ("model.lora_configs.0.lora_rank", "model.lora_configs.1.lora_rank"),
        ("model.custom_chat_template", "model.chat_template_path"),
        (f"{TASKS}tasksets.0.default_workflow_type", f"{TASKS}tasksets.1.default_workflow_type"),
        (f"{TASKS}tasksets.0.default_reward_fn_type", f"{TASKS}tasksets.1.default_reward_fn_type"),
    ],
)
def test_one_of_two_values_that_is_left_out_changes_training(first, second):
    assert lost(**{f"{TASKS}tasksets.0.path": "a.jsonl", first: 2, second: 3}) == [second]


@pytest.mark.parametrize(
    ("keys", "epochs", "versions"),
    [
        ({"buffer.total_epochs": 3}, 3, None),
        ({"buffer.total_epochs": 3, "buffer.total_steps": 50}, 50 * 8, 50),
        ({"trainer.total_steps": 50, "synchronizer.sync_interval": 4}, 50 * 8, 13),
        ({"buffer.total_epochs": 3, "buffer.total_steps": 0}, 3, None),
    ],
)
def test_learn_ends_after_the_steps_or_the_epochs(keys, epochs, versions):
    done = convert(Given({**MODEL, f"{TASKS}taskset.path": "a.jsonl", "buffer.batch_size": 8, **keys}))
    learn = done.learn()
    assert learn is not None and (learn["epochs"], learn.get("versions")) == (epochs, versions)
    assert not done.lost


def test_an_example_learns_for_so_many_versions_with_its_own_tasks():
    workflow = {f"{TASKS}taskset.default_workflow_type": "frozen_lake_workflow"}
    learn = convert(Given({**MODEL, **workflow, "buffer.total_steps": 50})).learn()
    assert learn is not None and learn["versions"] == 50 and "epochs" not in learn


def test_the_steps_of_a_trainer_alone_are_lost():
    assert lost(**{"mode": "train", "trainer.total_steps": 50}) == ["trainer.total_steps"]


def test_one_of_two_values_on_which_no_training_depends_is_left_out_without_a_mark():
    eval_sets = {f"{TASKS}eval_tasksets.{number}.path": f"{number}.jsonl" for number in range(2)}
    assert not lost(**{f"{TASKS}taskset.path": "a.jsonl", **eval_sets})


def test_an_environment_that_only_the_second_task_set_has_is_lost():
    names = {0: "math_workflow", 1: "frozen_lake_workflow"}
    workflows = {f"{TASKS}tasksets.{number}.default_workflow_type": name for number, name in names.items()}
    assert lost(**workflows) == [f"{TASKS}tasksets.1.default_workflow_type"]


def test_a_default_that_every_task_set_replaces_is_not_needed():
    own, default = f"{TASKS}taskset.default_workflow_type", f"{TASKS}default_workflow_type"
    done = convert(Given({**MODEL, default: "simple_workflow", own: "math_workflow"}))
    assert [line.fate for line in done.lines if line.key == default] == [Fate.NOT_NEEDED] and not done.lost
    assert "What Trinity's math_workflow does" in done.workflow()


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"enable_chunked_prefill": False}, ["--no-enable-chunked-prefill"]),
        ({"enable_chunked_prefill": True}, ["--enable-chunked-prefill"]),
        ({"limit": None, "swap_space": 2}, ["--swap-space", "2"]),
        ({"disable_log_stats": False, "swap_space": 2}, ["--swap-space", "2"]),
        ({"disable_log_stats": True}, ["--disable-log-stats"]),
        ({"cudagraph_capture_sizes": [1, 2]}, ["--cudagraph-capture-sizes", "1", "2"]),
        ({"compilation_config.fast_moe_cold_start": False}, ["--compilation-config.fast_moe_cold_start", "false"]),
        ({"compilation_config.fast_moe_cold_start": True}, ["--compilation-config.fast_moe_cold_start", "true"]),
    ],
)
def test_an_argument_of_the_engine_is_written_as_vllm_reads_it(extra, expected):
    assert arguments(**extra) == expected


def test_a_flag_that_two_keys_set_differently_is_reported():
    off, on = f"{EXTRA}enforce_eager", "explorer.rollout_model.enforce_eager"
    assert lost(**{on: True, off: False}) == [off]


def test_a_number_that_others_are_divided_by_is_named_where_it_is_no_divisor():
    with pytest.raises(ConfigError, match=r"^synchronizer.sync_interval=0 is no value that Trinity takes; correct it"):
        converted(as_yaml({**MODEL, "trainer.save_interval": 10, "synchronizer.sync_interval": 0}))


@pytest.mark.parametrize("number", range(len(ODD)), ids=[repr(value)[:9] for value in ODD])
def test_a_key_with_an_odd_value_is_converted_or_refused_in_one_line(number):
    """In the short form each key with every fourth of the values."""
    for name in NAMES if FULL else NAMES[number % 4 :: 4]:
        try:
            done = convert(Given({**KINDS["grpo_lora"], "algorithm.kl_penalty_fn": "k1", name: ODD[number]}))
        except ConfigError as error:
            assert "\n" not in str(error)
        else:
            assert done.flywheel() and (done.learn() is None or compile(done.workflow(), "workflow.py", "exec"))


@pytest.mark.parametrize(
    "text",
    ["name: !!timestamp 2024-02-30", "name: &a [*a]", f"name: {'[' * 2000}{']' * 2000}", f"name: {'9' * 5000}"],
    ids=["date", "anchor", "depth", "digits"],
)
def test_a_file_without_plain_values_is_refused_in_one_line(text, capsys):
    Path("trinity.yaml").write_text(f"model: {{model_path: /m}}\n{text}\n", encoding="utf-8")
    assert cli.main(["convert-config", "trinity.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "trinity.yaml" in line


@pytest.mark.parametrize("value", ["!!set {a, b}", "!!binary aGk=", "!!timestamp 2024-01-01", "[!!binary aGk=]"])
@pytest.mark.parametrize("key", ["model_path", "temperature", "no_such_key"])
def test_a_value_of_a_type_that_no_key_has_is_refused_in_one_line(key, value, capsys):
    text = f"buffer: {{explorer_input: {{taskset: {{path: a.jsonl}}}}}}\nmodel:\n  model_path: /m\n  {key}: {value}\n"
    Path("trinity.yaml").write_text(text, encoding="utf-8")
    assert cli.main(["convert-config", "trinity.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"model.{key}=" in line and line.endswith("is no value that Trinity takes; correct it")
    assert list(Path().iterdir()) == [Path("trinity.yaml")]


def test_a_date_is_text_as_trinity_reads_it():
    done = converted("name: 2024-02-30\nmodel: {model_path: /m}\nbuffer: {explorer_input: {taskset: {path: a.jsonl}}}")
    assert (done.settings["learn.name"], done.settings["root_dir"]) == (
        "2024-02-30",
        "./checkpoints/Trinity-RFT/2024-02-30",
    )


@pytest.mark.parametrize("name", ["007", "1.10", "1_000", "12:30", "on", "2024"])
def test_a_name_in_a_variable_is_text_even_if_it_looks_like_a_number(name):
    text = """
name: ${oc.env:RUN_NAME,none}
project: ${name}
model: {model_path: "${oc.env:RUN_NAME}", max_model_len: "${oc.env:LENGTH}"}
trainer: {param_offload: "${oc.env:OFFLOAD,false}"}
buffer: {explorer_input: {taskset: {path: a.jsonl}}}
"""
    done = converted(text, RUN_NAME=name, LENGTH="4096")
    assert (done.settings["learn.name"], done.settings["model.path"]) == (name, name)
    assert done.settings["root_dir"] == f"./checkpoints/{name}/{name}"
    assert done.settings["engine.max_model_len"] == 4096 and not any("offload" in path for path in done.settings)


@pytest.mark.parametrize("default", ["null", ""])
def test_a_name_whose_variable_has_no_default_is_trinity_s(default):
    done = converted(f"project: ${{oc.env:NO_SUCH,{default}}}\nname: one\nmodel: {{model_path: /m}}")
    assert done.settings["root_dir"] == "./checkpoints/Trinity-RFT/one"


@pytest.mark.parametrize(
    ("default", "path"),
    [("'/models/base'", "/models/base"), ('"/models/base"', "/models/base"), ("'", "'"), ("'a\"", "'a\"")],
)
def test_a_default_in_quotes_is_the_text_between_them(default, path):
    text = as_yaml({"model.model_path": f"${{oc.env:NO_SUCH, {default}}}"})
    assert converted(text).settings["model.path"] == path


def test_a_home_folder_that_does_not_exist_is_refused_in_one_line(capsys):
    assert exit_status({"model.model_path": "~nobody-of-this-name/m"}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "flywheel: ~nobody-of-this-name/m: the user has no home folder here; write the whole path"


def test_numbers_and_switches_in_quotes_are_those_without():
    quoted = {"model.max_prompt_tokens": "1024", "model.max_response_tokens": "512", "model.enable_thinking": "false"}
    updates = {"algorithm.optimizer.lr_warmup_steps": "5", "trainer.param_offload": "False"}
    quoted["explorer.rollout_model.enable_chunked_prefill"] = "false"
    done = convert(Given({**MODEL, **quoted, **updates})).settings
    assert done["engine.max_model_len"] == 1536 and done["trainer.warmup_updates"] == 5
    assert done["engine.extra_args.--default-chat-template-kwargs"] == '{"enable_thinking": false}'
    assert not any("offload" in path for path in done)
    assert done["engine.extra_args.--enable-chunked-prefill"] is False
