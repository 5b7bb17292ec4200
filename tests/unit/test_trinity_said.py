"""What the command says of keys: what agents have to change, and why a key is not needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from services import cli
from services.trinity.convert import Line, convert
from services.trinity.key import Fate, Given

VERL = "trainer.trainer_config.trainer."
MODEL = {"model.model_path": "/m"}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def line_of(key: str, **keys: object) -> Line:
    (line,) = [line for line in convert(Given({**MODEL, **keys})).lines if line.key == key]
    return line


def reason(key: str, value: object) -> str:
    return line_of(key, **{key: value}).remark


def test_the_line_of_the_model_names_it_as_clients_request_it():
    assert "clients name it `agent`" in line_of("model.model_path").remark


def test_without_a_task_set_a_reply_s_bound_is_asked_of_the_caller():
    line = line_of("model.max_response_tokens", mode="serve", **{"model.max_response_tokens": 100})
    assert line.fate is Fate.NO_COUNTERPART and not line.changes_training
    assert line.remark.startswith("send it with each chat, or write it into the model's generation_config.json")


def test_what_a_trainer_alone_reads_of_sampling_is_the_explorer_s():
    line = line_of("model.max_response_tokens", mode="train", **{"model.max_response_tokens": 100})
    assert line.fate is Fate.NOT_NEEDED


def test_a_key_that_is_not_needed_has_its_own_reason():
    assert "rows are packed" in reason(f"{VERL}balance_batch", False)
    assert reason("trainer.save_hf_checkpoint", "always") == "every version is safetensors as Hugging Face writes them"
    assert "versions.max_versions" in reason(f"{VERL}max_actor_ckpt_to_keep", 5)
    actor = "trainer.trainer_config.actor_rollout_ref.actor."
    assert "trainer.save_every" in reason(f"{actor}checkpoint.save_contents", ["model"])
    for key in ("trainer.ulysses_sequence_parallel_size", f"{actor}ulysses_sequence_parallel_size"):
        assert reason(key, 1).startswith("one GPU computes a whole sequence")


@pytest.mark.parametrize(
    ("monitor", "watch"),
    [
        ({"monitor_type": "tensorboard"}, {"tensorboard": True}),
        ({"monitor_type": "wandb"}, {"wandb": "shop"}),
        ({"monitor_type": "mlflow"}, {"mlflow": "http://localhost:5000"}),
        ({"monitor_type": "mlflow", "monitor_args": {"uri": "http://ml:1"}}, {"mlflow": "http://ml:1"}),
    ],
)
def test_figures_go_where_trinity_s_monitor_sends_them(monitor, watch):
    keys = {f"monitor.{key}": value for key, value in monitor.items() if key != "monitor_args"}
    args = {f"monitor.monitor_args.{key}": value for key, value in monitor.get("monitor_args", {}).items()}
    done = convert(Given({**MODEL, "project": "shop", **keys, **args}))
    assert done.flywheel()["trainer"]["watch"] == watch and not done.lost


def test_an_unknown_monitor_is_reported_with_the_known_ones():
    assert "tensorboard, wandb or mlflow" in reason("monitor.monitor_type", "swanlab")


def test_a_file_without_indentation_gets_an_error_about_indentation(capsys):
    Path("0.yaml").write_text("mode: serve\nmodel:\nmodel_path: /m\n  max_model_len: 8192\n", encoding="utf-8")
    assert cli.main(["convert-config", "0.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("correct that line, or the indentation of the lines before it")


@pytest.mark.parametrize(("key", "value"), [("trainer.get_exp_strategy", "fifo"), ("model.trust_remote_code", "False")])
def test_a_name_in_another_case_and_a_switch_in_quotes_ask_for_nothing_special(key, value):
    assert line_of(key, **{key: value}).fate is Fate.NOT_NEEDED


def test_chats_are_sampled_by_trinity_s_defaults_and_not_by_those_of_the_model_s_folder():
    tasks = {"buffer.explorer_input.taskset.path": "tasks.jsonl", "model.top_p": 0.9}
    done = convert(Given({**MODEL, **tasks}))
    params = (done.learn() or {})["params"]
    assert params == {"temperature": 1.0, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0}
    assert "learn.params.top_k is -1: Trinity's default, where ours is another" in done.remarks
    assert convert(Given({**MODEL, **tasks, "mode": "train"})).learn() is None
