"""Extract samples to record from an engine's reply: token ids, logprobs and message.

On the hot path: one pass decodes only the fields that are recorded.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Raw

from explorer_service.chat.request import ChatRequest
from explorer_service.engines.dispatch import EngineReply
from explorer_service.engines.slot import EngineSlot
from explorer_service.errors import NO_JSON, EngineLost, InvalidReply
from shared.experience import CorruptTokens, Sample, TokenArray, Tokens

_MAX_FINISH_REASON = 40  # characters that are stored
_ABORTED = "abort"  # vLLM's finish reason of a request that it gave up
_Index = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None
    token_logprobs: list[float | None] | None = None  # of a plain completion


class _Choice(msgspec.Struct):
    index: _Index
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None  # of a plain completion
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _WholeChoice(_Choice):
    """A choice of a whole reply."""

    message: Raw = Raw(b"")  # the engine's bytes
    text: str | None = None  # of a plain completion


class _ChoiceDelta(_Choice):
    """What one event adds to a choice."""

    delta: dict[str, Any] | None = None
    text: str | None = None  # of a plain completion


class _Finish(msgspec.Struct):
    finish_reason: str | None = None


class _Unrecorded(msgspec.Struct):
    """A whole reply of which nothing is recorded: its logprobs, if it has any, may be of any form."""

    id: str
    choices: list[_Finish] = []


class _Reply(msgspec.Struct):
    id: str
    choices: list[_WholeChoice]
    prompt_token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    id: str | None = None  # missing in an error
    choices: list[_ChoiceDelta] = []  # empty in an event with usage or an error
    prompt_token_ids: list[int] | None = None
    error: Any = None


_CallIndex = Annotated[int, msgspec.Meta(ge=0, lt=10_000)]  # of a tool call in its message
_decode_unrecorded = msgspec.json.Decoder(_Unrecorded).decode
_decode_reply = msgspec.json.Decoder(_Reply).decode
_decode_events = msgspec.json.Decoder(list[_Event]).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


def capture_reply(chat: ChatRequest, reply: EngineReply) -> list[Sample]:
    """Return a sample for each choice of a whole reply; none for an error, or if the chat is not recorded.

    Raises InvalidReply, EngineLost.
    """
    if reply.status != 200:
        return []
    samples: list[Sample] = []
    slot = reply.slot
    try:
        completion = (_decode_reply if chat.recorded else _decode_unrecorded)(reply.content)
        _require_id(completion.id, chat, slot)
        _require_not_aborted(completion.choices, slot)
        if isinstance(completion, _Unrecorded):
            return []
        for choice in completion.choices:
            captured = _Captured(completion.prompt_token_ids or [])
            captured.add(choice)
            message = bytes(choice.message) or msgspec.json.encode(choice.text)
            samples.append(captured.sample(choice.index, message, chat, slot, is_first=not samples))
    except NO_JSON as exc:
        raise InvalidReply(f"engine {slot.engine.name} gave a reply that is no chat completion") from exc
    return samples


def capture_events(events: list[bytes], chat: ChatRequest, slot: EngineSlot) -> list[Sample]:
    """Return a sample for each choice of a stream; none if it contains an error, because the reply is incomplete.

    Raises InvalidReply for events that are not of a chat completion, EngineLost for a reply that the engine gave up.
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
            for choice in event.choices:
                index = choice.index
                if index not in choices:
                    choices[index], messages[index] = _Captured([]), _Message()
                choices[index].add(choice)
                messages[index].add(choice.delta or ({} if choice.text is None else {"content": choice.text}))
        _require_not_aborted(choices.values(), slot)
        samples: list[Sample] = []
        for index, captured in sorted(choices.items()):
            captured.prompt_ids = captured.prompt_ids or prompt_ids
            message = messages[index].encode()
            samples.append(captured.sample(index, message, chat, slot, is_first=not samples))
    except NO_JSON as exc:
        raise InvalidReply(f"engine {slot.engine.name} streamed what is no chat completion") from exc
    return samples


def require_own_id(event: bytes, chat: ChatRequest, slot: EngineSlot) -> None:
    """Check the id in a stream's first event, which callers use as message id. Raises InvalidReply."""
    try:
        found = _decode_events(b"[" + event[6:-2] + b"]") if event.startswith(b"data: {") else []
    except NO_JSON as exc:
        raise InvalidReply(f"engine {slot.engine.name} streamed what is no chat completion") from exc
    if found and found[0].choices:
        _require_id(found[0].id, chat, slot)


def _require_id(found: str | None, chat: ChatRequest, slot: EngineSlot) -> None:
    """Raise InvalidReply for another id: the reply answers another request, and feedback could not reach its row."""
    if found != chat.msg_id:
        raise InvalidReply(f"engine {slot.engine.name} answered {found!r} instead of {chat.msg_id!r}")


def _require_not_aborted(choices: Iterable[_Finish | _Choice | _Captured], slot: EngineSlot) -> None:
    """Raise EngineLost if the engine gave the reply up: vLLM does so when it stops, or if others pause it."""
    if any(choice.finish_reason == _ABORTED for choice in choices):
        raise EngineLost(slot.engine.name, "it aborted the reply")


class _Captured:
    """The sampled data of one choice so far, from a whole reply or from a stream's events."""

    __slots__ = ("finish_reason", "logprobs", "prompt_ids", "reply_ids")

    def __init__(self, prompt_ids: list[int]) -> None:
        self.prompt_ids = prompt_ids
        self.reply_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None

    def add(self, choice: _Choice) -> None:
        """Append token ids and logprobs; set the finish reason."""
        logprobs = choice.logprobs
        self.reply_ids += choice.token_ids or ()
        self.prompt_ids = choice.prompt_token_ids or self.prompt_ids
        if logprobs is not None and logprobs.content:
            self.logprobs += [entry.logprob for entry in logprobs.content]
        elif logprobs is not None and logprobs.token_logprobs:
            self.logprobs += [math.nan if value is None else value for value in logprobs.token_logprobs]
        self.finish_reason = choice.finish_reason or self.finish_reason

    def sample(self, index: int, reply: bytes, chat: ChatRequest, slot: EngineSlot, *, is_first: bool) -> Sample:
        """Return the sample to record. If its arrays do not agree, it is marked for quarantine, never corrected.

        reply: JSON of the message. is_first: also store the request, once for all choices of the message.
        """
        tokens = Tokens(_ids(self.prompt_ids), _ids(self.reply_ids), np.array(self.logprobs, dtype=np.float32))
        try:
            tokens.check()
            quarantine = None
        except CorruptTokens as exc:
            quarantine = str(exc)
        attribution = chat.attribution
        return Sample(
            msg_id=chat.msg_id,
            choice=index,
            version=slot.first_version,
            version_end=slot.last_version,
            tokens=tokens,
            sampling=replace(slot.engine.sampling_defaults, **chat.sampling),
            finish_reason=None if self.finish_reason is None else self.finish_reason[:_MAX_FINISH_REASON],
            created_at=chat.created_at,
            latency_s=time.perf_counter() - chat.received_at,
            task_id=attribution.task_id,
            run_id=attribution.run_id,
            key_name=attribution.caller.name,
            key_group=attribution.caller.group,
            request=chat.text if is_first else None,
            reply=None if chat.text is None else reply,
            quarantine=quarantine,
            exchange=_exchange(reply, chat),
            extends=attribution.extends,
        )


def _exchange(reply: bytes, chat: ChatRequest) -> bytes | None:
    """Return the digest of all messages including this reply; None if the reply is nested too deeply.

    reply: JSON of the message. Raises msgspec.DecodeError if it is not an object.
    """
    if not chat.surface.has_messages:
        return None
    try:
        return chat.attribution.digest.copy().add_reply({"role": "assistant", **_decode_object(reply)})
    except RecursionError:  # it is still recorded, but no later turn can be linked to it
        return None


def _ids(values: list[int]) -> TokenArray:
    """Return the ids as an array [N] int32. Raises InvalidReply for an id of more than 32 bits."""
    try:
        return np.frombuffer(struct.pack(f"={len(values)}i", *values), dtype=np.int32)
    except struct.error as exc:
        raise InvalidReply(f"a token id in the engine's reply is out of range ({exc})") from exc


class _Message:
    """A message, assembled from a stream's deltas."""

    __slots__ = ("_fields", "_texts")

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._texts: list[str] = []  # content to append: most deltas have nothing else

    def add(self, delta: dict[str, Any]) -> None:
        content = delta.get("content")
        if len(delta) == 1 and isinstance(content, str):
            self._texts.append(content)
        else:
            self._flush()
            _merge_delta(self._fields, delta)

    def _flush(self) -> None:
        if self._texts:
            _merge_delta(self._fields, {"content": "".join(self._texts)})
            self._texts.clear()

    def encode(self) -> bytes:
        """Return the message as JSON."""
        self._flush()
        return msgspec.json.encode(self._fields)


def _merge_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Merge a delta into the message: append texts, merge tool calls by index, set other fields.

    Raises msgspec.ValidationError for malformed tool calls.
    """
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for call in msgspec.convert(value or [], list[dict[str, Any]]):
                index = msgspec.convert(call.get("index", 0), _CallIndex)
                calls += [{} for _ in range(index + 1 - len(calls))]
                _merge_delta(calls[index], {k: v for k, v in call.items() if k != "index"})
        elif isinstance(value, dict):
            known = message.get(name)
            message[name] = known if isinstance(known, dict) else {}
            _merge_delta(message[name], value)
        elif isinstance(value, str) and name in ("content", "reasoning", "reasoning_content", "arguments", "refusal"):
            known = message.get(name)
            message[name] = known + value if isinstance(known, str) else value
        elif value is not None or name not in message:
            message[name] = value
