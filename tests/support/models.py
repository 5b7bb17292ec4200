"""A tiny model for tests: a real Hugging Face folder, generated on demand, the same bits each time."""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path
from unittest import mock

from shared.config import Config
from shared.ledger.connect import Ledger
from shared.versions import Manifest, read_manifest, version_path

_written: dict[str, dict[Path, bytes]] = {}  # the files of version 0, by what its model's folder contains


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


def publish_base(config: Config) -> Path:
    """Publish version 0 in a new root folder, for tests of what comes after it. Returns its folder.

    As the product does, but a process computes a model's probe once: later roots get the same files.
    """
    from trainer_service import publish
    from trainer_service.base_version import ensure_base_version

    write = publish.write_base_version

    def write_once(root: Path, model_folder: Path) -> Manifest:
        key, folder = _contents(model_folder), root / version_path(0)
        if key not in _written:
            manifest = write(root, model_folder)
            _written[key] = {file.relative_to(folder): file.read_bytes() for file in _files(folder)}
            return manifest
        for name, content in _written[key].items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return read_manifest(folder)

    patched = mock.patch.object(publish, "write_base_version", write_once)
    with closing(Ledger.open(config.ledger_url)) as ledger, patched:
        ensure_base_version(config, ledger)
    return config.root / version_path(0)


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _contents(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in _files(folder):
        digest.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()
