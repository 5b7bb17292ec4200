"""Checks that a version is the same model as version 0, by config.json: tensors of different models may look alike.

The trainer copies version 0's config.json next to full weights. The config of another writer may differ in harmless
keys, such as the release of the library that wrote it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared.errors import VersionError

CONFIG = "config.json"
_MAX_BYTES = 4_000_000
_NAMES = ("architectures", "model_type")
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size"),
)


def read_architecture(folder: Path) -> dict[str, Any]:
    """Return the names and sizes in config.json; None for those that it lacks. Raises VersionError, OSError."""
    file = folder / CONFIG
    if file.stat().st_size > _MAX_BYTES:
        raise VersionError(f"{folder}: {CONFIG} has more than {_MAX_BYTES} bytes")
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as exc:
        raise VersionError(f"{folder}: {CONFIG} is damaged ({exc})") from exc
    if not isinstance(found, dict):
        raise VersionError(f"{folder}: {CONFIG} is damaged (it holds no object)")
    return {key: found.get(key) for key in (*_NAMES, *_SIZES)}


def require_same_architecture(folder: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise VersionError with the first difference. A size that only one of the two has is not compared."""
    for key, value in found.items():
        wanted = expected[key]
        if value != wanted and (key in _NAMES or (value is not None and wanted is not None)):
            raise VersionError(f"{folder}: {CONFIG} says {key} {value!a:.200}, and {wanted!a:.200} in version 0")
