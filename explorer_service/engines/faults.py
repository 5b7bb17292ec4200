"""What an engine's error means: its own words, and whether this machine caused it."""

from __future__ import annotations

import errno

import msgspec

from explorer_service.errors import NO_JSON

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)


class _Error(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Error


_decode_refusal = msgspec.json.Decoder(_Refusal).decode


def message_of(content: bytes) -> str:
    """Return the message of an engine's error; empty for other content."""
    try:
        return _decode_refusal(content).error.message
    except NO_JSON:
        return ""


def is_shortage(error: BaseException | None) -> bool:
    """Whether this machine had no descriptors, memory or ports for the connection."""
    return isinstance(error, OSError) and error.errno in _SHORTAGES
