"""What the engine sampled: token ids, logprobs and message out of its reply, as samples to record.

On the hot path: of the JSON only what is recorded is decoded, in one go.
"""

from __future__ import annotations

import math
import struct
import time
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw

from explorer_service.engines.pool import Seat
from explorer_service.errors import unavailable
from explorer_service.request import Chat
from explorer_service.strip import strip_reply
from shared.experience import CorruptTokens, Sample, Sampling, TokenArray, Tokens


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None
    token_logprobs: list[float | None] | None = None  # of a plain completion


class _Choice(msgspec.Struct):
    index: int
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None  # of a plain completion
    finish_reason: str | None = None


class _WholeChoice(_Choice):
    """What it says and its logprobs as the engine wrote them."""

    message: Raw = Raw(b"")
    text: Raw = Raw(b"null")  # of a plain completion
    logprobs: Raw = Raw(b"null")


class _Reply(msgspec.Struct):
    choices: list[_WholeChoice]
    prompt_token_ids: list[int] | None = None


class _Part(_Choice):
    """What an event adds to a choice."""

    delta: dict[str, Any] | None = None
    text: str | None = None  # of a plain completion
    logprobs: _Logprobs | None = None


class _Event(msgspec.Struct):
    choices: list[_Part] = []  # none in one that tells of usage, or of an error
    prompt_token_ids: list[int] | None = None


_decode_reply = msgspec.json.Decoder(_Reply).decode
_decode_events = msgspec.json.Decoder(list[_Event]).decode
_decode_logprobs = msgspec.json.Decoder(_Logprobs | None).decode


def split_reply(content: bytes, chat: Chat, seat: Seat) -> tuple[bytes, list[Sample]]:
    """The engine's reply as the caller gets it, and a sample for each choice. Raises ApiError 503."""
    samples = []
    try:
        reply = _decode_reply(content)
        for choice in reply.choices:
            sampled = _Sampled(reply.prompt_token_ids or [])
            sampled.add(choice, _decode_logprobs(choice.logprobs))
            samples.append(sampled.sample(choice.index, bytes(choice.message) or bytes(choice.text), chat, seat))
    except msgspec.DecodeError as exc:
        raise unavailable(f"engine {seat.engine.name} gave a reply that is no chat completion", "engine_reply") from exc
    return strip_reply(content, [choice.logprobs for choice in reply.choices], chat), samples


def join_events(events: list[bytes], chat: Chat, seat: Seat) -> list[Sample]:
    """A sample for each choice of a stream. Raises ApiError 503 for events that are no chat completion's."""
    chunks = b",".join([event[6:-2] for event in events if event.startswith(b"data: {")])
    prompt_ids: list[int] = []
    choices: dict[int, _Sampled] = {}
    messages: dict[int, _Message] = {}
    try:
        for event in _decode_events(b"[" + chunks + b"]"):
            prompt_ids = event.prompt_token_ids or prompt_ids
            for part in event.choices:
                index = part.index
                if index not in choices:
                    choices[index], messages[index] = _Sampled([]), _Message()
                choices[index].add(part, part.logprobs)
                messages[index].add(part.delta or ({} if part.text is None else {"content": part.text}))
    except msgspec.DecodeError as exc:
        raise unavailable(f"engine {seat.engine.name} streamed what is no chat completion", "engine_reply") from exc
    samples = []
    for index, sampled in sorted(choices.items()):
        sampled.prompt_ids = sampled.prompt_ids or prompt_ids
        samples.append(sampled.sample(index, messages[index].encode(), chat, seat))
    return samples


def effective_sampling(chat: Chat, seat: Seat) -> Sampling:
    """The caller's parameters, and the engine's defaults where the caller said nothing."""
    return replace(seat.engine.sampling_defaults, **chat.sampling) if chat.sampling else seat.engine.sampling_defaults


class _Sampled:
    """What one choice has sampled so far: a whole reply at once, or a stream's parts one by one."""

    __slots__ = ("finish_reason", "logprobs", "prompt_ids", "reply_ids")

    def __init__(self, prompt_ids: list[int]) -> None:
        self.prompt_ids = prompt_ids
        self.reply_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None

    def add(self, choice: _Choice, logprobs: _Logprobs | None) -> None:
        """Take in token ids, logprobs and the finish reason of a choice."""
        self.reply_ids += choice.token_ids or ()
        self.prompt_ids = choice.prompt_token_ids or self.prompt_ids
        if logprobs is not None and logprobs.content:
            self.logprobs += [entry.logprob for entry in logprobs.content]
        elif logprobs is not None and logprobs.token_logprobs:
            self.logprobs += [math.nan if value is None else value for value in logprobs.token_logprobs]
        self.finish_reason = choice.finish_reason or self.finish_reason

    def sample(self, index: int, reply: bytes, chat: Chat, seat: Seat) -> Sample:
        """The row to record; one whose arrays do not agree is marked for quarantine, never mended.

        reply: JSON of what it says.
        """
        tokens = Tokens(_ids(self.prompt_ids), _ids(self.reply_ids), np.array(self.logprobs, dtype=np.float32))
        try:
            tokens.check()
            quarantine = None
        except CorruptTokens as exc:
            quarantine = str(exc)
        return Sample(
            msg_id=chat.msg_id,
            choice=index,
            version=seat.version,
            version_end=seat.version_now,
            tokens=tokens,
            sampling=effective_sampling(chat, seat),
            finish_reason=self.finish_reason,
            created_at=chat.created_at,
            latency_s=time.perf_counter() - chat.started,
            task_id=chat.task_id,
            run_id=chat.run_id,
            key_name=chat.caller.name,
            key_group=chat.caller.group,
            request=chat.raw if chat.store_text else None,
            reply=reply if chat.store_text else None,
            quarantine=quarantine,
            exchange=chat.exchange(reply),
            extends=chat.extends,
        )


def _ids(values: list[int]) -> TokenArray:
    """As an array: [N] int32. (Of a thousand, NumPy's own way takes 16 to 22 µs and this 7.)"""
    return np.frombuffer(struct.pack(f"={len(values)}i", *values), dtype=np.int32)


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
    """Add a delta to the message: texts are joined, tool calls are joined by their index, the rest is set."""
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for part in value or []:
                while len(calls) <= part.get("index", 0):
                    calls.append({})
                _merge_delta(calls[part.get("index", 0)], {k: v for k, v in part.items() if k != "index"})
        elif isinstance(value, dict):
            _merge_delta(message.setdefault(name, {}), value)
        elif isinstance(value, str) and name in ("content", "reasoning", "reasoning_content", "arguments", "refusal"):
            message[name] = (message.get(name) or "") + value
        elif value is not None or name not in message:
            message[name] = value
