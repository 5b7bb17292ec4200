"""Linking turns that name no run: a request whose messages extend an earlier exchange belongs to its conversation.

Every recorded choice carries `exchange`, a digest of all messages up to and with its reply. A later request looks for
the digests of its own prefixes that end with an assistant's message. Clients send replies back slightly changed (null
or absent fields, arguments of tools written anew), so a message counts by what it says: role, text, tool calls.
Pure: knows nothing of SQL or HTTP.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

DIGEST_BYTES = 16
MAX_PREFIXES = 64  # assistant turns looked for, from the last one back

_encode = msgspec.json.Encoder(order="deterministic").encode


class Digest:
    """Messages taken in one by one. Digests of different keys, tasks or runs never agree."""

    __slots__ = ("_hash",)

    def __init__(self, *scope: str | None) -> None:
        self._hash = hashlib.blake2b(_encode(scope), digest_size=DIGEST_BYTES)

    def add(self, message: Any) -> None:
        self._hash.update(canonical(message))

    def value(self) -> bytes:
        """The digest of all messages so far."""
        return self._hash.digest()

    def copy(self) -> Digest:
        other = object.__new__(Digest)
        other._hash = self._hash.copy()
        return other


def read_prompt(messages: Any, *scope: str | None) -> tuple[Digest, tuple[bytes, ...]]:
    """A request's messages: the digest to which a reply is added, and the exchanges it may extend, longest first."""
    digest = Digest(*scope)
    prefixes: list[bytes] = []
    for message in messages if isinstance(messages, list) else ():
        digest.add(message)
        if isinstance(message, dict) and message.get("role") == "assistant":
            prefixes.append(digest.value())
    return digest, tuple(reversed(prefixes[-MAX_PREFIXES:]))


def first_words(messages: Any) -> int:
    """A number that all turns of a conversation share: made of everything up to the first reply."""
    digest = Digest()
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "assistant":
            break
        digest.add(message)
    return int.from_bytes(digest.value()[:8], "little")


def canonical(message: Any) -> bytes:
    """What a message says, as bytes."""
    if not isinstance(message, dict):
        return _encode(message)
    said = [message.get("role"), _text(message.get("content")), message.get("tool_call_id")]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            said += [call.get("id"), function.get("name"), _arguments(function.get("arguments"))]
    return _encode(said)


def _text(content: Any) -> Any:
    """A text and a list of text parts that say the same are the same; clients strip the ends."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content.strip()
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content).strip()
    return content


def _arguments(arguments: Any) -> Any:
    """Arguments of a tool call, whatever their spacing and order."""
    if isinstance(arguments, str):
        try:
            return msgspec.json.decode(arguments)
        except msgspec.DecodeError:
            return arguments
    return arguments
