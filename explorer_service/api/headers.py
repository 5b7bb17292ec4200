"""Header values as text."""

from __future__ import annotations

from collections.abc import Mapping


def header_text(headers: Mapping[str, str], name: str) -> str | None:
    """Return a header's value, decoded as UTF-8, like JSON; or else as Latin-1, which older clients send."""
    value = headers.get(name)  # Starlette decodes every value as Latin-1
    if value is None or value.isascii():
        return value
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return value
