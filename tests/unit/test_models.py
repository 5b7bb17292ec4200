"""The base model's folder: it is whole, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import StartupError
from tests.support import architectures
from trainer_service.models import load_causal_lm, named_weights

FP8 = torch.float8_e4m3fn
BLOCK = 128


def make_folder(folder: Path, **quantization: Any) -> Path:
    architectures.make("qwen2").save_pretrained(folder)
    if quantization:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
    return folder


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_folder_that_lacks_a_weight_is_refused(name, tmp_path):
    """Transformers only warns, and begins with a random one."""
    file = make_folder(tmp_path) / "model.safetensors"
    weights = load_file(file)
    del weights[name]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(StartupError, match=f"lacks weights .{name}, 1 in all"):
        load_causal_lm(tmp_path)


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "cohere", "opt"])
def test_a_tied_output_embedding_is_no_missing_weight(name, tmp_path):
    own = architectures.make(name, tie_word_embeddings=True)
    own.save_pretrained(tmp_path)
    assert torch.equal(load_causal_lm(tmp_path).get_output_embeddings().weight, own.get_input_embeddings().weight)


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "compressed-tensors", "a new one", None])
def test_quantized_weights_that_cannot_be_converted_are_refused(method, tmp_path):
    make_folder(tmp_path, quant_method=method)
    with pytest.raises(
        StartupError, match=f"is quantized .{method}., and the trainer needs whole weights; name the folder of"
    ):
        load_causal_lm(tmp_path)


def test_weights_in_8_bits_are_converted(tmp_path):
    """As DeepSeek's and Qwen's folders have them: a scale for each block."""
    make_folder(tmp_path, quant_method="fp8", activation_scheme="dynamic", weight_block_size=[BLOCK, BLOCK])
    whole = load_file(tmp_path / "model.safetensors")
    stored = dict(whole)
    for name, weight in whole.items():
        if "_proj.weight" in name:  # no weight is larger than a block
            scale = weight.abs().max() / torch.finfo(FP8).max
            stored[name] = (weight / scale).to(FP8)
            stored[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_causal_lm(tmp_path)
    assert "quantization_config" not in model.config.to_dict()
    assert named_weights(model).keys() == whole.keys(), "no scale is left"
    for name, weight in named_weights(model).items():
        assert weight.dtype is torch.float32
        assert float((weight.detach() - whole[name]).abs().max()) <= float(whole[name].abs().max()) / 16, name
