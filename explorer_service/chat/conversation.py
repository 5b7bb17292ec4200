"""Linking turns that name no run: a request whose messages extend an earlier exchange belongs to its conversation.

Every recorded choice carries `exchange`, a digest of all messages up to and with its reply. A later request looks for
the digests of its own prefixes that end with an assistant's message. Clients send replies back slightly changed (null
or absent fields, arguments of tools written anew), so a message counts by what it says: role, text, tool calls. Some
frameworks also rewrite the history: an exchange that ends with tool calls is known by the engine's random id of the
first one alone, and reminders that a framework moves along the conversation do not count. An assistant's text may be a
rewritten reply (smolagents makes text of tool calls and adds to text), so it is also tried as what it may have been.
Pure: knows nothing of SQL or HTTP.
"""

from __future__ import annotations

import hashlib
import re
from itertools import islice
from typing import Any

import msgspec

DIGEST_BYTES = 8  # in ten million exchanges two agree with a chance of 3 in a million, 2^46.5 pairs over 2^64
MAX_PREFIXES = 64  # assistant turns looked for, from the last one back
MAX_REWRITTEN = 16  # messages, from the last one back, whose assistant turns are also tried as rewritten replies
MAX_CALLS = 16  # ids in a rewritten reply that are tried

# The engine's random ids of tool calls: 16 hexadecimal digits or more somewhere, or Mistral's nine characters. Ids like
# Kimi's "functions.search:0" come again in every conversation.
_RANDOM_ID = re.compile(r"[0-9a-f]{16}|\A[A-Za-z0-9]{9}\Z")
# A call's id in a text: where a call written as Python or JSON has it; an id that is unmistakable counts anywhere.
_ID_OF_CALL = re.compile(r"""id['"]: ?['"]([\w-]{9,80})['"], ?['"](?:type|function|name)['"]""", re.ASCII)
_UNMISTAKABLE_ID = re.compile(r"(?:chatcmpl-tool-|call_(?:\d{1,3}_)?)[0-9a-f]{16,32}")
# What smolagents adds to a reply: its calls as text, and before them the stop sequence at which code ended.
_ADDED_CALLS = "\nCalling tools:\n[{"
_ADDED_STOP = "</code>"

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
        return self.value() if call_id is None else self._of_call(call_id)

    def of_rewritten(self, reply: Any) -> list[bytes]:
        """The exchanges that an assistant's text would end if a framework had rewritten it; call this before `add`.

        In the order of their certainty: by the ids of calls that the text holds, by the text before what a framework
        adds; with neither, by the ids that the text mentions.
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
    """A request's messages: the digest to which a reply is added, and the exchanges it may extend, longest first."""
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
    """A number that all turns of a conversation share: made of everything up to the first reply."""
    digest = Digest()
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "assistant":
            break
        digest.add(message)
    return int.from_bytes(digest.value(), "little")


def _random_id(reply: Any) -> str | None:
    """The id of a reply's first tool call, if no other call has it."""
    calls = reply.get("tool_calls") if isinstance(reply, dict) else None
    first = calls[0] if isinstance(calls, list) and calls else None
    name = first.get("id") if isinstance(first, dict) else None
    return name if isinstance(name, str) and _RANDOM_ID.search(name) else None


def _without_additions(text: str) -> list[str]:
    """The replies of which smolagents may have made this text."""
    reply, added, last = text.rpartition(_ADDED_CALLS)
    found = [reply] if added else []
    closed = reply if added else last
    if closed.endswith(_ADDED_STOP):
        found.append(closed.removesuffix(_ADDED_STOP))
    return found


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
    parts = [message.get("role"), _text(message.get("content")), message.get("tool_call_id")]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            parts += [call.get("id"), function.get("name"), _arguments(function.get("arguments"))]
    return _encode(parts)


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
            return msgspec.Raw(_encode(msgspec.json.decode(arguments)))
        except (msgspec.DecodeError, RecursionError):  # no JSON, or too deep to be written anew
            return arguments
    return arguments
