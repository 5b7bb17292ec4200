"""Tiny random models of several architectures, generated on demand."""

from __future__ import annotations

from typing import Any

NAMES = ("qwen2", "llama", "gemma2", "mistral", "gpt_oss", "qwen3_5", "lfm2")
PLAIN = ("qwen2", "llama", "gemma2", "mistral", "gpt_oss")  # only attention connects the tokens of a row


SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {"attention_bias": True}),
    "gemma2": ("Gemma2", {"sliding_window": 7, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "granite": ("Granite", {"logits_scaling": 3.0}),
    "qwen3_5": (
        "Qwen3_5Text",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "qwen3_moe": ("Qwen3Moe", {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "gpt_oss": (
        "GptOss",  # eager: PyTorch's grouped product has no float64
        {"sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    ),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
}


def make(name: str, *, seed: int = 0, vocabulary: int = 211, **over: Any) -> Any:
    """A causal LM with large random weights, in float32. mistral: each token attends to the last 7."""
    import torch
    import transformers

    prefix, extra = OWN[name]
    config = getattr(transformers, f"{prefix}Config")(**{**SHAPE, "vocab_size": vocabulary, **extra, **over})
    torch.manual_seed(seed)
    return getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config).eval()
