"""Linking turns that name no run: a request whose messages extend an earlier exchange belongs to its conversation.

Every recorded choice carries `exchange`, a digest of all messages up to and with its reply. A later request looks for
the digests of its own prefixes that end with an assistant's message. Clients send replies back slightly changed (null
or absent fields, arguments of tools written anew), so a message counts by what it says: role, text, tool calls. Some
frameworks also rewrite the history: an exchange that ends with tool calls is known by the engine's random id of the
first one alone, and reminders that a framework moves along the conversation do not count.
Pure: knows nothing of SQL or HTTP.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import msgspec

DIGEST_BYTES = 8  # in ten million exchanges two agree with a chance of 3 in a million, 2^46.5 pairs over 2^64
MAX_PREFIXES = 64  # assistant turns looked for, from the last one back

# The engine's random ids of tool calls: 16 hexadecimal digits or more somewhere, or Mistral's nine characters. Ids like
# Kimi's "functions.search:0" come again in every conversation.
_RANDOM_ID = re.compile(r"[0-9a-f]{16}|\A[A-Za-z0-9]{9}\Z")

_encode = msgspec.json.Encoder(order="deterministic").encode


class Digest:
    """Messages taken in one by one. Digests of different keys, tasks or runs never agree."""

    __slots__ = ("_hash", "_scope")

    def __init__(self, *scope: str | None) -> None:
        self._scope = _encode(scope)
        self._hash = hashlib.blake2b(self._scope, digest_size=DIGEST_BYTES)

    def add(self, message: Any) -> None:
        if not _is_reminder(message):
            self._hash.update(canonical(message))

    def value(self) -> bytes:
        """The digest of all messages so far."""
        return self._hash.digest()

    def add_reply(self, reply: Any) -> bytes:
        """Take in an assistant's message; the digest of the exchange that it ends."""
        self.add(reply)
        call_id = _random_id(reply)
        if call_id is None:
            return self.value()
        return hashlib.blake2b(self._scope + call_id.encode(), digest_size=DIGEST_BYTES).digest()

    def copy(self) -> Digest:
        other = object.__new__(Digest)
        other._scope = self._scope
        other._hash = self._hash.copy()
        return other


def read_prompt(messages: Any, *scope: str | None) -> tuple[Digest, tuple[bytes, ...]]:
    """A request's messages: the digest to which a reply is added, and the exchanges it may extend, longest first."""
    digest = Digest(*scope)
    prefixes: list[bytes] = []
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "assistant":
            prefixes.append(digest.add_reply(message))
        else:
            digest.add(message)
    return digest, tuple(reversed(prefixes[-MAX_PREFIXES:]))


def first_words(messages: Any) -> int:
    """A number that all turns of a conversation share: made of everything up to the first reply."""
    digest = Digest()
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "assistant":
            break
        digest.add(message)
    return int.from_bytes(digest.value()[:8], "little")


def _random_id(reply: Any) -> str | None:
    """The id of a reply's first tool call, if no other call has it."""
    calls = reply.get("tool_calls") if isinstance(reply, dict) else None
    first = calls[0] if isinstance(calls, list) and calls else None
    name = first.get("id") if isinstance(first, dict) else None
    return name if isinstance(name, str) and _RANDOM_ID.search(name) else None


def _is_reminder(message: Any) -> bool:
    """Whether a framework says this, and not a user: AgentScope 2 and others send it anew with every turn."""
    if not isinstance(message, dict) or message.get("role") != "user":
        return False
    text = _text(message.get("content"))
    return isinstance(text, str) and text.startswith("<system-reminder>") and text.endswith("</system-reminder>")


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
