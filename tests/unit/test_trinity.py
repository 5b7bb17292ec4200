"""Trinity-RFT's configurations are taken over: every key has a fate, and what is written loads."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from flywheel import LearnConfig

from services import cli
from services.trinity import table
from services.trinity.convert import THEIR_DEFAULTS, convert, exists
from services.trinity.key import Fate, Given, expand
from services.trinity.read import read
from shared.config import Config, load_config
from tests.support.servers import RunningExplorer, free_port, write_scripted_version
from tests.support.trinity_files import EXPLORER, KINDS, REACT, TRAINER, as_yaml, converted
from tests.support.trinity_page import fill, tables

PAGE = Path(__file__).parents[2] / "docs/trinity.md"
FILES = {**{name: as_yaml(keys) for name, keys in KINDS.items()}, "react": REACT, "explorer": EXPLORER}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


SAMPLED = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}  # by Trinity, where a file does not say otherwise


def command(*texts: str, lenient: bool = False) -> int:
    """The exit status of the command over files with these texts."""
    for number, text in enumerate(texts):
        Path(f"{number}.yaml").write_text(text, encoding="utf-8")
    names = [f"{number}.yaml" for number in range(len(texts))]
    return cli.main(["convert-config", *names, *(["--lenient"] if lenient else [])])


def written() -> Config:
    return load_config("flywheel.yaml", environ={})


def error_of(*texts: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert command(*texts) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not Path("flywheel.yaml").exists()
    return line.removeprefix("flywheel: ")


@pytest.mark.parametrize("kind", FILES)
def test_every_kind_of_configuration_is_converted_and_loads(kind, capsys):
    assert command(FILES[kind]) in (0, 1)
    config = written()
    assert config.explorer.host == "127.0.0.1" and config.model.path
    said = capsys.readouterr().out
    assert "no key of Trinity" not in said
    keys = read([Path("0.yaml")], {})[0]
    numbers = dict(re.findall(r"^(kept|renamed|not needed|no counterpart): (\d+)$", said, re.MULTILINE))
    assert len(numbers) == 4 and sum(map(int, numbers.values())) == len(keys)
    has_tasks = "taskset" in FILES[kind] or "dataset_path" in FILES[kind]
    assert Path("learn.yaml").exists() == has_tasks
    if has_tasks:
        assert LearnConfig.load("learn.yaml").runs_per_task == yaml.safe_load(Path("learn.yaml").read_text()).get(
            "runs_per_task", 1
        )


def test_arguments_of_the_engine_that_learning_depends_on_are_not_taken_over(capsys):
    extra = "{swap_space: 2, generation_config: vllm, override_generation_config: {top_k: 5}, served_model_name: other}"
    assert command(EXPLORER.replace("seed: 42}", f"extra_engine_args: {extra}}}")) == 1
    assert written().engine.extra_args[-2:] == ("--swap-space", "2")
    said = capsys.readouterr().out
    for name in ("generation_config", "override_generation_config.top_k"):
        assert re.search(rf"^! explorer.rollout_model.extra_engine_args.{name} ", said, re.MULTILINE)


def test_an_explorer_s_and_a_trainer_s_file_become_one(capsys):
    assert command(EXPLORER, TRAINER) == 1
    config = written()
    assert config.root_dir == "/shared/shop/desk" and config.model.path == "/models/base"
    assert config.engine.model_dump(include={"max_model_len", "tool_parser", "dtype", "extra_args"}) == {
        "max_model_len": 8192,
        "tool_parser": "hermes",
        "dtype": "bfloat16",
        "extra_args": ("--seed", "42"),
    }
    assert [engine.devices for engine in config.explorer.engines] == [(0, 1), (2, 3)]
    assert config.explorer.reload.poll_interval_s == 10
    trainer = config.trainer
    assert (trainer.algorithm, trainer.batch_size, trainer.publish_every, trainer.save_every) == ("ppo", 32, 1, 16)
    assert (trainer.epochs, trainer.minibatches, trainer.ppo.lam, trainer.ppo.kl_coef) == (1, 1, 1.0, 0.001)
    assert config.versions.max_versions == 5
    said = capsys.readouterr().out
    assert re.search(r"^! model.temperature +send it with each chat", said, re.MULTILINE)
    assert "buffer.train_batch_size: the files differ, and the trainer's counts" in said
    assert "Trinity listens on 0.0.0.0 without a key" in said


def test_what_is_lost_ends_with_1_unless_that_is_allowed():
    assert command(TRAINER) == 0
    Path("flywheel.yaml").unlink()
    assert command(as_yaml(KINDS["opmd"]), lenient=True) == 0


def test_the_settings_of_a_task_set_are_learn_s(capsys):
    command(as_yaml(KINDS["grpo_eval"]))
    config = LearnConfig.load("learn.yaml")
    assert (config.name, config.runs_per_task, config.epochs, config.at_once) == ("one", 8, 1, 16)
    assert config.params == {"max_tokens": 1024, "temperature": 1.0, **SAMPLED}
    assert (config.eval_every_versions, config.eval_runs) == (25, 4)
    assert config.eval_params == {**SAMPLED, "max_tokens": 1024, "temperature": 1.0, "top_p": 0.8, "top_k": 20}
    said = capsys.readouterr().out
    assert "learn workflow:workflow tasks.jsonl --eval held_out.jsonl --config learn.yaml" in said
    assert written().trainer.batch_size == 32 * 8


def test_a_listed_address_other_than_loopback_is_not_taken_over():
    done = converted("model: {model_path: /m}\nexplorer: {listen_address: 0.0.0.0}")
    assert done.settings["explorer.host"] == "127.0.0.1"
    assert any("0.0.0.0 without a key" in remark for remark in done.remarks)


def test_an_unknown_key_is_named_with_its_nearest():
    done = converted("model: {model_path: /m}\nexplorer: {rollout_model: {tensor_paralel_size: 2}}")
    (line,) = done.lost
    assert line.fate is Fate.NO_COUNTERPART
    assert line.remark == ("no key of Trinity 0.6; did you mean explorer.rollout_model.tensor_parallel_size?")


def test_a_setting_that_two_keys_give_differently_is_reported():
    args = "{clip_range: 0.2, clip_range_low: 0.1}"
    done = converted(f"model: {{model_path: /m}}\nalgorithm: {{policy_loss_fn_args: {args}}}")
    (line,) = done.lost
    assert line.key == "algorithm.policy_loss_fn_args.clip_range_low" and "is set by" in line.remark


def test_without_a_task_set_the_temperature_alone_is_asked_of_the_caller():
    model = "{model_path: /m, temperature: 0.7, top_p: 0.9, max_response_tokens: 100}"
    assert [line.key for line in converted(f"mode: serve\nmodel: {model}").lost] == ["model.temperature"]
    assert not converted("mode: serve\nmodel: {model_path: /m, temperature: 1.0}").lost


def test_variables_and_other_keys_are_resolved():
    text = """
checkpoint_root_dir: ${oc.env:ROOT,./here}
project: p
name: ${project}-${oc.env:N,1}
model: {model_path: "${oc.env:BASE,${oc.env:HOME_OF_MODELS}/m}"}
explorer: {proxy_port: "${oc.env:PORT,8010}"}
"""
    done = converted(text, HOME_OF_MODELS="/models", PORT="8020")
    assert done.settings["root_dir"] == "./here/p/p-1"
    assert done.settings["model.path"] == "/models/m"
    assert done.settings["explorer.port"] == 8020


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (
            ["a: [1"],
            "0.yaml is not YAML at line 1, column 6; correct that line, or the indentation of the lines before it",
        ),
        (["- 1"], "0.yaml holds no keys; name Trinity's YAML file"),
        (["a: 1"], "no key of the file is one of Trinity's; name Trinity's YAML file"),
        (["mode: both"], "model.model_path is missing; add it to Trinity's file"),
        (
            ["model: {model_path: '${oc.env:NO_SUCH_VARIABLE}'}"],
            "0.yaml: model.model_path needs the environment variable NO_SUCH_VARIABLE; set it",
        ),
        (
            ["model: {model_path: '${no.such.key}'}"],
            "0.yaml: model.model_path: ${no.such.key} names no value of the file; correct it",
        ),
        (
            ["model: {model_path: '${oc.select:a}'}"],
            "0.yaml: model.model_path: ${oc.select:a} cannot be resolved here; write the value",
        ),
        (
            [EXPLORER, TRAINER.replace("temperature: 0.7", "temperature: 0.8")],
            "0.yaml and 1.yaml disagree in model.temperature, which must be the same in both; correct one of them",
        ),
        (
            [EXPLORER, TRAINER.replace("experiences", "others")],
            "0.yaml and 1.yaml disagree in buffer.trainer_input.experience_buffer.name, which must be the same in "
            "both; correct one of them",
        ),
        (
            [EXPLORER, EXPLORER],
            "of two files one is the trainer's, with `mode: train`; correct mode, or name one file",
        ),
        (
            ["model: {model_path: /m}\nbuffer: {batch_size: many}"],
            "buffer.batch_size='many' is no value that Trinity takes; correct it",
        ),
        (
            ["model: {model_path: /m}\nalgorithm: {optimizer: {lr: -1}}"],
            "0.yaml cannot be taken over: trainer.learning_rate=-1: input should be greater than 0; correct it",
        ),
        ([EXPLORER] * 3, "3 files are given; name one, or an explorer's and a trainer's"),
    ],
)
def test_what_cannot_be_taken_over_is_refused_in_one_line(texts, said, capsys):
    assert error_of(*texts, capsys=capsys) == said


def test_a_missing_file_and_one_that_is_no_text_are_refused(capsys):
    assert cli.main(["convert-config", "none.yaml"]) == 2
    assert "none.yaml cannot be read" in capsys.readouterr().err
    Path("latin.yaml").write_bytes(b"name: \xe9\n")
    assert cli.main(["convert-config", "latin.yaml"]) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err


def test_a_file_that_exists_is_not_written_over(capsys):
    assert command(TRAINER) == 0
    before = Path("flywheel.yaml").read_text()
    assert command(TRAINER.replace("8192", "4096")) == 2
    assert "flywheel.yaml exists" in capsys.readouterr().err
    assert Path("flywheel.yaml").read_text() == before


def test_a_relative_path_stays_where_it_was_when_the_result_is_in_another_folder(tmp_path):
    Path("trinity.yaml").write_text("checkpoint_root_dir: data\nmodel: {model_path: ./base}\n")
    Path("conf").mkdir()
    assert cli.main(["convert-config", "trinity.yaml", "-o", "conf/flywheel.yaml"]) == 0
    config = load_config("conf/flywheel.yaml", environ={})
    assert Path(config.model.path).resolve() == tmp_path / "base"
    assert config.root.resolve() == tmp_path / "data/Trinity-RFT/rft"


def test_no_key_is_in_two_rows_and_every_target_exists():
    names = [name for key in table.KEYS for name in expand(key.names)]
    assert len(names) == len(set(names))
    options = {field.name for field in dataclasses.fields(LearnConfig)}
    for key in table.KEYS:
        ours = key.to.replace("ALGORITHM", "ppo")
        if ours.startswith("learn."):
            assert ours.split(".")[1] in options, key
        elif ours and not ours.endswith("*") and "lora" not in ours:
            assert exists(ours), key
    assert all(exists(path.replace("ALGORITHM", "ppo")) for path in THEIR_DEFAULTS)


def test_the_page_has_the_tables_that_the_command_converts_by():
    page = PAGE.read_text(encoding="utf-8")
    assert fill(page) == page, "write tests.support.trinity_page.fill of docs/trinity.md back to it"
    assert all(text in page for text in tables().values())


def test_an_explorer_starts_with_the_converted_file(scripted_engine, tmp_path):
    port = int(scripted_engine.url.rpartition(":")[2])
    keys = {
        **KINDS["ppo"],
        "checkpoint_root_dir": str(tmp_path),
        "model.model_path": str(tmp_path / "base"),
        "explorer.proxy_port": free_port(),
        "explorer.rollout_model.engine_num": 1,
        "explorer.rollout_model.base_port": port,
        "explorer.rollout_model.dtype": "float32",
    }
    assert command(as_yaml(keys)) == 0
    config = written()
    write_scripted_version(config.root, 0, -1.0)
    explorer = RunningExplorer(config)
    try:
        assert explorer.wait_ready().chat(model="agent").status_code == 200
    finally:
        explorer.stop()


def test_a_configuration_without_a_value_asks_for_nothing():
    lines = convert(Given({"model.model_path": "/m", "algorithm.kl_loss_fn_args": {}, "explorer.db_url": None})).lines
    assert [line.fate for line in lines[1:]] == [Fate.NOT_NEEDED, Fate.NOT_NEEDED]


def test_a_task_set_s_own_sampling_counts_before_the_model_s():
    command(as_yaml(KINDS["grpo_frozen_lake"]))
    assert LearnConfig.load("learn.yaml").params["temperature"] == 1.0


def test_an_adapter_is_taken_over_with_trinity_s_size_where_none_is_given():
    assert command("model: {model_path: /m, lora_configs: [{name: one, target_modules: [q_proj, v_proj]}]}") == 0
    model = written().model
    assert (model.kind, model.lora.rank, model.lora.alpha) == ("lora", 32, 32)
    assert model.lora.targets == ("q_proj", "v_proj")
