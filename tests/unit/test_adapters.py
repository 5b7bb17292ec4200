"""Adapters in service: names, vLLM's arguments, the warm-up's adapter of zeros, and what stays staged."""

from __future__ import annotations

from pathlib import Path

import pytest

from explorer_service.chat.redact import rename
from services.engine.adapters import adapter_arguments, warm_up_adapters, write_zeros
from services.engine.stage import Stage
from shared.adapters import require_adapter
from shared.config import Config
from shared.errors import StartupError
from shared.tensors import Tensor, make_header
from tests.support.servers import make_config, write_scripted_version

BASE = {
    "model.embed_tokens.weight": Tensor("BF16", (10, 4)),
    "model.layers.0.self_attn.q_proj.weight": Tensor("BF16", (6, 4)),
    "model.layers.0.self_attn.q_proj.bias": Tensor("BF16", (6,)),
    "model.layers.0.mlp.up_proj.weight": Tensor("I8", (8, 4)),
    "lm_head.weight": Tensor("BF16", (10, 4)),
}


def write_base(folder: Path) -> None:
    header = make_header(BASE)
    size = sum(tensor.data_bytes for tensor in BASE.values())
    (folder / "model.safetensors").write_bytes(header + bytes(size))


def config_of(root: Path, engine: dict[str, object] | None = None, **lora: object) -> Config:
    return make_config(root, ["http://e0"], model={"kind": "lora", "lora": lora}, engine=engine)


@pytest.mark.parametrize("field", ['"model":"%s"', '"model": "%s"'])
def test_an_answer_names_the_model_as_the_caller_did_and_its_text_stays(field):
    text = b'"content":"the \\"model\\":\\"agent@1+0a0b0c0d\\" of agent@1+0a0b0c0d"'
    json = b"{%s,%s}" % ((field % "agent@1+0a0b0c0d").encode(), text)
    assert rename(json, "agent@1+0a0b0c0d", "agent@1") == b"{%s,%s}" % ((field % "agent@1").encode(), text)


def test_vllm_is_started_for_as_many_adapters_and_as_high_a_rank_as_are_configured(tmp_path):
    config = config_of(tmp_path, {"max_loras": 3, "max_cpu_loras": 5}, rank=9)
    write_base(tmp_path)
    assert adapter_arguments(config, tmp_path, on_cpu=False) == [
        *("--enable-lora", "--max-loras", "3", "--max-cpu-loras", "5", "--max-lora-rank", "16"),
        *("--lora-target-modules", "q_proj", "up_proj"),
    ]
    on_cpu = adapter_arguments(config, tmp_path, on_cpu=True)
    assert on_cpu[2:5] == ["6", "--max-cpu-loras", "6"], "the last one holds zeros"
    assert adapter_arguments(make_config(tmp_path, ["http://e0"]), tmp_path, on_cpu=True) == []


def test_vllm_is_told_which_layers_adapters_change(tmp_path):
    """It would also prepare the output layer, and die when it scores a prompt."""
    write_base(tmp_path)
    arguments = adapter_arguments(config_of(tmp_path, targets=["self_attn.q_proj"]), tmp_path, on_cpu=True)
    assert arguments[-2:] == ["--lora-target-modules", "q_proj"]
    with pytest.raises(StartupError, match=r"no_proj.* names no linear layer of"):
        adapter_arguments(config_of(tmp_path, targets=["no_proj"]), tmp_path, on_cpu=True)


@pytest.mark.parametrize(
    ("engine", "number", "more"),
    [
        ({}, 4, "a higher engine.max_loras"),
        ({"max_loras": 2}, 2, "a higher engine.max_loras"),
        ({"max_loras": 3, "max_cpu_loras": 5}, 3, "a higher engine.max_loras"),
        ({"max_loras": 3, "max_cpu_loras": 4}, 3, "a higher engine.max_loras and engine.max_cpu_loras"),
        ({"max_loras": 3, "max_cpu_loras": 3}, 2, "a higher engine.max_cpu_loras"),
    ],
)
def test_chats_are_divided_among_as_many_versions_as_an_engine_computes_at_once(tmp_path, engine, number, more):
    config = config_of(tmp_path, engine)
    assert (config.versions_served, config.needed_to_serve_more) == (number, more)
    whole = make_config(tmp_path, ["http://e0"])
    assert (whole.versions_served, whole.needed_to_serve_more) == (1, "model.kind: lora")


@pytest.mark.parametrize("engine", [{"max_loras": 4, "max_cpu_loras": 3}, {"max_loras": 2, "max_cpu_loras": 2}])
def test_too_few_adapter_places_are_refused_with_the_setting_to_change(tmp_path, engine):
    with pytest.raises(ValueError, match=f"set at least {max(3, engine['max_loras'])}"):
        config_of(tmp_path, engine)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"]])
def test_the_adapter_of_the_warm_up_is_one_that_fits_the_base(tmp_path, targets):
    write_zeros(config_of(tmp_path, targets=targets), BASE, tmp_path)
    require_adapter(tmp_path, BASE, "")


def test_an_engine_is_warmed_up_with_two_adapters_and_on_a_cpu_with_one_for_each_slot(tmp_path):
    base = write_scripted_version(tmp_path, 0, -1.0)
    with warm_up_adapters(config_of(tmp_path, {"max_loras": 2}), base, on_cpu=False) as adapters:
        assert adapters is not None and (adapters.count, adapters.keeps_last) == (2, False)
    with warm_up_adapters(config_of(tmp_path, {"max_loras": 2}), base, on_cpu=True) as adapters:
        assert adapters is not None and (adapters.count, adapters.keeps_last) == (5, True)
    with warm_up_adapters(make_config(tmp_path, ["http://e0"]), base, on_cpu=True) as none:
        assert none is None


def test_what_an_engine_may_read_again_stays_staged(tmp_path):
    for version in range(4):
        write_scripted_version(tmp_path, version, -1.0)
    stage = Stage(tmp_path, tmp_path / "staged", keep=2)
    first = stage.stage(1)
    for version in (2, 3):
        stage.stage(version, in_use=[1])
    assert first.is_dir()
    stage.stage(2, in_use=[])
    stage.stage(0)
    assert not first.is_dir()
