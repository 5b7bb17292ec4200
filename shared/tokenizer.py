"""A digest of a model's vocabulary: tokens of one tokenizer mean nothing to a model with another."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from shared.errors import StartupError

_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json")  # without tokenizer.json


def tokenizer_digest(folder: Path) -> str | None:
    """Return the digest of the vocabulary in a Hugging Face folder, ignoring other settings; None: it has none.

    Raises StartupError for a damaged tokenizer.json.
    """
    file = folder / "tokenizer.json"
    if file.exists():
        try:
            tokenizer = dict(json.loads(file.read_bytes()))
        except (ValueError, TypeError, RecursionError) as exc:
            raise StartupError(f"{file} is not a tokenizer's JSON ({exc}); fetch the model's files again") from exc
        meaning = json.dumps([tokenizer.get("model"), tokenizer.get("added_tokens")], sort_keys=True).encode()
        return hashlib.sha256(meaning).hexdigest()[:16]
    files = [folder / name for name in _FILES if (folder / name).exists()]
    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
    return whole.hexdigest()[:16] if files else None
