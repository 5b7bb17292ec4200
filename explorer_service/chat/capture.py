"""What the engine sampled: token ids, logprobs and message out of its reply, as samples to record.

On the hot path: of the JSON only what is recorded is decoded, in one go.
"""

from __future__ import annotations

import math
import struct
import time
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Raw

from explorer_service.chat.request import ChatRequest
from explorer_service.engines.dispatch import EngineReply
from explorer_service.engines.slot import EngineSlot
from explorer_service.errors import NO_JSON, InvalidReply
from shared.experience import CorruptTokens, Sample, TokenArray, Tokens


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None
    token_logprobs: list[float | None] | None = None  # of a plain completion


class _Choice(msgspec.Struct):
    index: int
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None  # of a plain completion
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _WholeChoice(_Choice):
    """What it says."""

    message: Raw = Raw(b"")  # as the engine wrote it
    text: str | None = None  # of a plain completion


class _Part(_Choice):
    """What an event adds to a choice."""

    delta: dict[str, Any] | None = None
    text: str | None = None  # of a plain completion


class _Identity(msgspec.Struct):
    id: str


class _Reply(_Identity):
    choices: list[_WholeChoice]
    prompt_token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    id: str | None = None  # none in an error
    choices: list[_Part] = []  # none in one that reports usage, or an error
    prompt_token_ids: list[int] | None = None
    error: Any = None


_CallIndex = Annotated[int, msgspec.Meta(ge=0, lt=10_000)]  # of a tool call in its message
_decode_identity = msgspec.json.Decoder(_Identity).decode
_decode_reply = msgspec.json.Decoder(_Reply).decode
_decode_events = msgspec.json.Decoder(list[_Event]).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


def capture_reply(chat: ChatRequest, reply: EngineReply) -> list[Sample]:
    """A sample for each choice of a whole reply; none of one that is an error, or not to be recorded.

    Raises InvalidReply.
    """
    if reply.status != 200:
        return []
    samples: list[Sample] = []
    slot = reply.slot
    try:
        if not chat.recorded:
            _require_id(_decode_identity(reply.content).id, chat, slot)
            return []
        completion = _decode_reply(reply.content)
        _require_id(completion.id, chat, slot)
        for choice in completion.choices:
            captured = _Captured(completion.prompt_token_ids or [])
            captured.add(choice)
            message = bytes(choice.message) or msgspec.json.encode(choice.text)
            samples.append(captured.sample(choice.index, message, chat, slot, is_first=not samples))
    except NO_JSON as exc:
        raise InvalidReply(f"engine {slot.engine.name} gave a reply that is no chat completion") from exc
    return samples


def capture_events(events: list[bytes], chat: ChatRequest, slot: EngineSlot) -> list[Sample]:
    """A sample for each choice of a stream; none of one that reports an error: what came before it is no whole reply.

    Raises InvalidReply for events that are no chat completion's.
    """
    chunks = b",".join([event[6:-2] for event in events if event.startswith(b"data: {")])
    prompt_ids: list[int] = []
    choices: dict[int, _Captured] = {}
    messages: dict[int, _Message] = {}
    try:
        for event in _decode_events(b"[" + chunks + b"]"):
            if event.error is not None:
                return []
            prompt_ids = event.prompt_token_ids or prompt_ids
            if event.choices:
                _require_id(event.id, chat, slot)
            for part in event.choices:
                index = part.index
                if index not in choices:
                    choices[index], messages[index] = _Captured([]), _Message()
                choices[index].add(part)
                messages[index].add(part.delta or ({} if part.text is None else {"content": part.text}))
        samples: list[Sample] = []
        for index, captured in sorted(choices.items()):
            captured.prompt_ids = captured.prompt_ids or prompt_ids
            message = messages[index].encode()
            samples.append(captured.sample(index, message, chat, slot, is_first=not samples))
    except NO_JSON as exc:
        raise InvalidReply(f"engine {slot.engine.name} streamed what is no chat completion") from exc
    return samples


def require_own_id(event: bytes, chat: ChatRequest, slot: EngineSlot) -> None:
    """Check a stream's first event: callers take the message id from it. Raises InvalidReply."""
    try:
        found = _decode_events(b"[" + event[6:-2] + b"]") if event.startswith(b"data: {") else []
    except NO_JSON as exc:
        raise InvalidReply(f"engine {slot.engine.name} streamed what is no chat completion") from exc
    if found and found[0].choices:
        _require_id(found[0].id, chat, slot)


def _require_id(found: str | None, chat: ChatRequest, slot: EngineSlot) -> None:
    """A reply under another id is not the answer to this request, and no feedback could reach its row."""
    if found != chat.msg_id:
        raise InvalidReply(f"engine {slot.engine.name} answered {found!r} where {chat.msg_id!r} was asked for")


class _Captured:
    """What one choice has sampled so far: a whole reply at once, or a stream's parts one by one."""

    __slots__ = ("finish_reason", "logprobs", "prompt_ids", "reply_ids")

    def __init__(self, prompt_ids: list[int]) -> None:
        self.prompt_ids = prompt_ids
        self.reply_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None

    def add(self, choice: _Choice) -> None:
        """Take in token ids, logprobs and the finish reason of a choice."""
        logprobs = choice.logprobs
        self.reply_ids += choice.token_ids or ()
        self.prompt_ids = choice.prompt_token_ids or self.prompt_ids
        if logprobs is not None and logprobs.content:
            self.logprobs += [entry.logprob for entry in logprobs.content]
        elif logprobs is not None and logprobs.token_logprobs:
            self.logprobs += [math.nan if value is None else value for value in logprobs.token_logprobs]
        self.finish_reason = choice.finish_reason or self.finish_reason

    def sample(self, index: int, reply: bytes, chat: ChatRequest, slot: EngineSlot, *, is_first: bool) -> Sample:
        """The row to record; one whose arrays do not agree is marked for quarantine, never corrected.

        reply: JSON of the message. is_first: the request is stored with it, for all choices of the message.
        """
        tokens = Tokens(_ids(self.prompt_ids), _ids(self.reply_ids), np.array(self.logprobs, dtype=np.float32))
        try:
            tokens.check()
            quarantine = None
        except CorruptTokens as exc:
            quarantine = str(exc)
        about = chat.attribution
        return Sample(
            msg_id=chat.msg_id,
            choice=index,
            version=slot.first_version,
            version_end=slot.last_version,
            tokens=tokens,
            sampling=replace(slot.engine.sampling_defaults, **chat.sampling),
            finish_reason=self.finish_reason,
            created_at=chat.created_at,
            latency_s=time.perf_counter() - chat.received_at,
            task_id=about.task_id,
            run_id=about.run_id,
            key_name=about.caller.name,
            key_group=about.caller.group,
            request=chat.text if is_first else None,
            reply=None if chat.text is None else reply,
            quarantine=quarantine,
            exchange=_exchange(reply, chat),
            extends=about.extends,
        )


def _exchange(reply: bytes, chat: ChatRequest) -> bytes | None:
    """The digest of all messages up to and with this one, of JSON; None for one too deep to be looked into.

    Raises msgspec.DecodeError when it is no object.
    """
    if not chat.surface.has_messages:
        return None
    try:
        return chat.attribution.digest.copy().add_reply({"role": "assistant", **_decode_object(reply)})
    except RecursionError:  # it is recorded all the same: no later turn can name it
        return None


def _ids(values: list[int]) -> TokenArray:
    """As an array: [N] int32. Raises InvalidReply for an id of more than 32 bits."""
    try:
        return np.frombuffer(struct.pack(f"={len(values)}i", *values), dtype=np.int32)
    except struct.error as exc:
        raise InvalidReply(f"a token id in the engine's reply is out of range ({exc})") from exc


class _Message:
    """A message that a stream's deltas make up."""

    __slots__ = ("_fields", "_texts")

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._texts: list[str] = []  # what nearly every delta is: more content

    def add(self, delta: dict[str, Any]) -> None:
        content = delta.get("content")
        if len(delta) == 1 and isinstance(content, str):
            self._texts.append(content)
        else:
            self._join()
            _merge_delta(self._fields, delta)

    def _join(self) -> None:
        if self._texts:
            _merge_delta(self._fields, {"content": "".join(self._texts)})
            self._texts.clear()

    def encode(self) -> bytes:
        """The message as JSON."""
        self._join()
        return msgspec.json.encode(self._fields)


def _merge_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to the message: texts are joined, tool calls are joined by their index, the rest is set.

    Raises msgspec.ValidationError for tool calls that are none.
    """
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for part in msgspec.convert(value or [], list[dict[str, Any]]):
                index = msgspec.convert(part.get("index", 0), _CallIndex)
                calls += [{} for _ in range(index + 1 - len(calls))]
                _merge_delta(calls[index], {k: v for k, v in part.items() if k != "index"})
        elif isinstance(value, dict):
            known = message.get(name)
            message[name] = known if isinstance(known, dict) else {}
            _merge_delta(message[name], value)
        elif isinstance(value, str) and name in ("content", "reasoning", "reasoning_content", "arguments", "refusal"):
            known = message.get(name)
            message[name] = known + value if isinstance(known, str) else value
        elif value is not None or name not in message:
            message[name] = value
