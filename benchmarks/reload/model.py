"""The model: about 10 M parameters, random weights, with a byte tokenizer. Generated on demand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a Qwen2 model."""

    layers: int
    width: int
    inner: int
    heads: int
    key_heads: int


SMALL = Shape(6, 384, 1024, 12, 12)  # heads 32 wide: vLLM's CPU attention supports no narrower ones
WIDE = Shape(2, 640, 1728, 10, 10)  # the same number of parameters
ONE_LAYER = Shape(1, 896, 4864, 14, 2)  # that of Qwen2.5-0.5B
LONGEST = 1024  # tokens
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(folder: Path, *, dtype: str = "float32", tied: bool = False, shape: Shape = SMALL) -> Path:
    """Write the model's folder in Hugging Face format."""
    model = new_model(dtype=dtype, tied=tied, shape=shape)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def new_model(*, dtype: str, tied: bool = False, shape: Shape = SMALL) -> Any:
    """The model in memory, always the same."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256 + len(SPECIAL),
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=tied,
        initializer_range=shape.width**-0.5,  # the scale at which layers keep the size of activations
        bos_token_id=None,
        eos_token_id=258,
        pad_token_id=256,
    )
    return Qwen2ForCausalLM(config).to(getattr(torch, dtype))


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: n for n, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    wrapped.add_special_tokens({"additional_special_tokens": [SPECIAL[1]]})
    wrapped.chat_template = TEMPLATE
    return wrapped
