"""A tiny model for tests: a real Hugging Face folder, generated on demand, the same bits each time."""

from __future__ import annotations

from pathlib import Path


def make_tiny_model(
    folder: Path, *, tied: bool = True, dtype: str = "float32", seed: int = 0, architecture: str = "Qwen2"
) -> Path:
    """A model of two layers and a word-level tokenizer with a chat template. Heads are 32 wide: vLLM's CPU attention
    supports no narrower ones.

    Transformers loads every Qwen folder with its byte-level BPE class, which does not know this vocabulary. So each
    word is an added token, and both classes give it the same id. Other text has no tokens.
    """
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = ["<unk>", "<|im_start|>", "<|im_end|>", "<pad>", "user", "assistant", "system", "hello"]
    vocabulary = {word: index for index, word in enumerate([*words, *(f"w{n}" for n in range(200))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<pad>"
    )
    wrapped.add_tokens([AddedToken(word, lstrip=True) for word in vocabulary])
    wrapped.chat_template = (
        "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
        "{% if add_generation_prompt %}<|im_start|> assistant{% endif %}"
    )
    torch.manual_seed(seed)
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=3,
    )
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder
