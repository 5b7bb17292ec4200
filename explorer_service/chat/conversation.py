"""Link turns without a run: a request whose messages extend an earlier exchange belongs to its conversation.

Every recorded choice has `exchange`, a digest of all messages including its reply. A later request is linked by the
digests of its own prefixes that end with an assistant's message. Clients send replies back slightly changed (null or
absent fields, reformatted tool arguments), so a digest covers only role, text and tool calls. Some frameworks rewrite
the history: so an exchange that ends with tool calls is identified only by the engine's random id of the first call,
and reminders that move along the conversation are ignored. An assistant's text may be a rewritten reply (smolagents
writes tool calls as text, and appends to text), so its possible originals are tried, too. Pure: no SQL, no HTTP.
"""

from __future__ import annotations

import hashlib
import re
from itertools import islice
from typing import Any

import msgspec

DIGEST_BYTES = 8  # among ten million exchanges, two collide with a chance of 3 in a million: 2^46.5 pairs over 2^64
MAX_PREFIXES = 64  # assistant turns that are tried, from the last one back
MAX_REWRITTEN = 16  # messages, from the last one back, whose assistant turns are also tried as rewritten replies
MAX_CALLS = 16  # ids in a rewritten reply that are tried

# The engine's random ids of tool calls: 16 hexadecimal digits or more somewhere, or Mistral's nine characters. Ids like
# Kimi's "functions.search:0" repeat in every conversation.
_RANDOM_ID = re.compile(r"[0-9a-f]{16}|\A[A-Za-z0-9]{9}\Z")
# A call's id in a text: at its place in a call in Python's or JSON's notation; an unmistakable id counts anywhere.
_ID_OF_CALL = re.compile(r"""id['"]: ?['"]([\w-]{9,80})['"], ?['"](?:type|function|name)['"]""", re.ASCII)
_UNMISTAKABLE_ID = re.compile(r"(?:chatcmpl-tool-|call_(?:\d{1,3}_)?)[0-9a-f]{16,32}")
# What smolagents appends to a reply: the stop sequence that ended code, then the calls as text.
_ADDED_CALLS = "\nCalling tools:\n[{"
_ADDED_STOP = "</code>"

_encode = msgspec.json.Encoder(order="deterministic").encode


class Digest:
    """A digest of messages, added one by one. Digests of different scopes (key, task, run) never match."""

    __slots__ = ("_hash", "_scope")

    def __init__(self, *scope: str | None) -> None:
        self._scope = _encode(scope)
        self._hash = hashlib.blake2b(self._scope, digest_size=DIGEST_BYTES)

    def add(self, message: Any) -> None:
        if not _is_reminder(message):
            self._hash.update(canonical(message))

    def value(self) -> bytes:
        """Return the digest of all messages so far."""
        return self._hash.digest()

    def add_reply(self, reply: Any) -> bytes:
        """Add an assistant's message. Returns the digest of the exchange that it ends."""
        self.add(reply)
        call_id = _random_id(reply)
        return self.value() if call_id is None else self._of_call(call_id)

    def of_rewritten(self, reply: Any) -> list[bytes]:
        """Return the exchanges that an assistant's text would end if a framework rewrote it. Call this before `add`.

        In order of certainty: by ids of calls in the text, by the text without a framework's additions; with neither,
        by ids that the text mentions.
        """
        text = None if reply.get("tool_calls") else _text(reply.get("content"))
        if not isinstance(text, str):
            return []
        found: list[bytes] = []
        if "{" in text:
            ids = filter(_RANDOM_ID.search, _ID_OF_CALL.findall(text))
            found += map(self._of_call, islice(ids, MAX_CALLS))
        if "{" in text or text.endswith(_ADDED_STOP):
            for original in _without_additions(text):
                before = self.copy()
                before.add({"role": "assistant", "content": original})
                found.append(before.value())
        if not found and ("chatcmpl-tool-" in text or ("_" in text and "call_" in text)):
            found += map(self._of_call, _UNMISTAKABLE_ID.findall(text)[:MAX_CALLS])
        return found

    def _of_call(self, call_id: str) -> bytes:
        return hashlib.blake2b(self._scope + call_id.encode(), digest_size=DIGEST_BYTES).digest()

    def copy(self) -> Digest:
        other = object.__new__(Digest)
        other._scope = self._scope
        other._hash = self._hash.copy()
        return other


def read_prompt(messages: Any, *scope: str | None) -> tuple[Digest, tuple[bytes, ...]]:
    """Return the digest of a request's messages, and the exchanges that they may extend, longest first."""
    digest = Digest(*scope)
    if not isinstance(messages, list):
        return digest, ()
    prefixes: list[bytes] = []
    rewritten: dict[bytes, list[bytes]] = {}
    recent = len(messages) - MAX_REWRITTEN
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") != "assistant":
            digest.add(message)
            continue
        others = digest.of_rewritten(message) if position >= recent else None
        prefixes.append(digest.add_reply(message))
        if others:
            rewritten[prefixes[-1]] = others
    extends = prefixes[: -MAX_PREFIXES - 1 : -1]
    if rewritten:
        extends = [exchange for prefix in extends for exchange in (prefix, *rewritten.get(prefix, ()))]
    return digest, tuple(extends)


def conversation_affinity(messages: Any) -> int:
    """Return a number that all turns of a conversation share: the digest of the messages before the first reply."""
    digest = Digest()
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "assistant":
            break
        digest.add(message)
    return int.from_bytes(digest.value(), "little")


def _random_id(reply: Any) -> str | None:
    """Return the id of a reply's first tool call if it is random, else None."""
    calls = reply.get("tool_calls") if isinstance(reply, dict) else None
    first = calls[0] if isinstance(calls, list) and calls else None
    name = first.get("id") if isinstance(first, dict) else None
    return name if isinstance(name, str) and _RANDOM_ID.search(name) else None


def _without_additions(text: str) -> list[str]:
    """Return the replies from which smolagents may have written this text."""
    reply, added, last = text.rpartition(_ADDED_CALLS)
    found = [reply] if added else []
    closed = reply if added else last
    if closed.endswith(_ADDED_STOP):
        found.append(closed.removesuffix(_ADDED_STOP))
    return found


def _is_reminder(message: Any) -> bool:
    """Whether a framework wrote this user message: AgentScope 2 and others repeat it in every turn."""
    if not isinstance(message, dict) or message.get("role") != "user":
        return False
    text = _text(message.get("content"))
    return isinstance(text, str) and text.startswith("<system-reminder>") and text.endswith("</system-reminder>")


def canonical(message: Any) -> bytes:
    """Return a message's role, text and tool calls as bytes, independent of formatting."""
    if not isinstance(message, dict):
        return _encode(message)
    parts = [message.get("role"), _text(message.get("content")), message.get("tool_call_id")]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            parts += [call.get("id"), function.get("name"), _arguments(function.get("arguments"))]
    return _encode(parts)


def _text(content: Any) -> Any:
    """Return the text of a string or of a list of text parts, stripped, as clients do; other content unchanged."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content.strip()
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content).strip()
    return content


def _arguments(arguments: Any) -> Any:
    """Return the arguments of a tool call with normalized spacing and order."""
    if isinstance(arguments, str):
        try:
            return msgspec.Raw(_encode(msgspec.json.decode(arguments)))
        except (msgspec.DecodeError, RecursionError):  # not JSON, or too deep to be encoded
            return arguments
    return arguments
