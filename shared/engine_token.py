"""The token that engines require for administrative calls. Only `flywheel engine` and the explorers know it.

It is engine.admin_token, or else the contents of a file in the root folder, which the first process creates.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from shared.config import Config
from shared.errors import StartupError

FILE = "engine.token"


def engine_token(config: Config) -> str:
    """Return the token. Raises StartupError if there is none and the root folder cannot be written."""
    if config.engine.admin_token is not None:
        return config.engine.admin_token
    file = config.root / FILE
    try:
        if not file.exists():
            _make(file)
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as exc:
        reason = getattr(exc, "strerror", None) or "it is not text"
        raise StartupError(
            f"the engines' token {file} cannot be read or made ({reason}); correct the folder's permissions, or set "
            "FLYWHEEL_ENGINE__ADMIN_TOKEN to one value for explorers and engines"
        ) from exc
    if not token:
        raise StartupError(f"the engines' token {file} is empty; delete it, and restart engines and explorers")
    return token


def known_token(config: Config) -> str | None:
    """Return the token if this process can read it, without making one; None: it cannot."""
    if config.engine.admin_token is not None:
        return config.engine.admin_token
    try:
        return (config.root / FILE).read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _make(file: Path) -> None:
    """Write a new token atomically; of two processes, the first one wins."""
    file.parent.mkdir(parents=True, exist_ok=True)
    own = file.with_name(f".{FILE}-{secrets.token_hex(8)}")
    descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(secrets.token_hex(24) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(own, file)
    finally:
        own.unlink(missing_ok=True)
