"""Section `explorer.keys`: keys of callers, and their roles."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import model_validator

from shared.config.base import Count, Flag, Name, Positive, Section, Variable, matches


class KeyConfig(Section):
    """A key that callers send as `Authorization: Bearer KEY`."""

    key_env: Variable | None = None
    """Environment variable with the key, of 16 characters or more. The file never contains the key itself."""
    sha256: Annotated[str, matches("[0-9a-f]{64}", "64 hexadecimal digits in lower case")] | None = None
    """Instead of key_env: the key's SHA-256 in hexadecimal (printf %s KEY | sha256sum)."""
    role: Literal["chat", "feedback", "admin"]
    """chat: chat. feedback: feedback and commit. admin: everything. Every role may read the status."""
    name: Name | None = None
    """The key's name in rows and signals; null: key_env, or the first digits of sha256."""
    group: Name | None = None
    """Group of the rows that its chats record, and that its feedback reaches; null: rows without a group."""
    all_groups: Flag = False
    """With role feedback: its feedback reaches the rows of all groups. (An admin without a group reaches all rows.)"""
    requests_per_minute: Positive | None = None
    """Requests above this rate are answered with 429; null: no limit."""
    requests_at_once: Count | None = None
    """Concurrent requests above this number are answered with 429; null: no limit."""

    @property
    def label(self) -> str:
        return self.name or self.key_env or f"sha256-{(self.sha256 or '')[:12]}"

    @model_validator(mode="after")
    def _check_one_source(self) -> KeyConfig:
        if (self.key_env is None) == (self.sha256 is None):
            raise ValueError("explorer.keys: each key has either key_env or sha256; give one of them")
        if self.all_groups and (self.group is not None or self.role != "feedback"):
            raise ValueError(f"explorer.keys {self.label!r}: all_groups is for keys of role feedback without a group")
        return self
