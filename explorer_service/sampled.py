"""What the engine sampled: token ids and logprobs out of its reply, and the reply without what nobody asked for.

On the hot path: JSON is taken apart only as far as needed; what passes through stays raw bytes.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import msgspec
import numpy as np
from msgspec import Raw

from explorer_service.engines.pool import Seat
from explorer_service.errors import unavailable
from explorer_service.request import Chat
from shared.experience import CorruptTokens, Sample, Sampling, Tokens

NULL = Raw(b"null")
EMPTY = Raw(b"[]")


class _Logprob(msgspec.Struct):
    logprob: float


class Logprobs(msgspec.Struct):
    """The part of a choice's logprobs that is recorded."""

    content: list[_Logprob] | None = None
    token_logprobs: list[float | None] | None = None  # of a plain completion


decode_raw = msgspec.json.Decoder(dict[str, Raw]).decode
decode_choices = msgspec.json.Decoder(list[dict[str, Raw]]).decode
decode_ids = msgspec.json.Decoder(list[int] | None).decode
_decode_logprobs = msgspec.json.Decoder(Logprobs | None).decode


def split_reply(content: bytes, chat: Chat, seat: Seat) -> tuple[bytes, list[Sample]]:
    """The engine's reply as the caller gets it, and a sample for each choice."""
    try:
        reply = decode_raw(content)
        choices = decode_choices(reply["choices"])
    except (msgspec.DecodeError, KeyError) as exc:
        raise unavailable(f"engine {seat.engine.name} gave a reply that is no chat completion", "engine_reply") from exc
    prompt_ids = decode_ids(reply.get("prompt_token_ids", NULL)) or []
    samples = []
    for choice in choices:
        sampled = Sampled(prompt_ids)
        sampled.add(choice)
        sampled.reply = bytes(choice.get("message") or choice.get("text", NULL))
        samples.append(sampled.sample(int(bytes(choice["index"])), chat, seat))
        strip(choice, chat)
    if not chat.keep_token_ids and "prompt_token_ids" in reply:
        reply["prompt_token_ids"] = NULL
    reply["choices"] = Raw(msgspec.json.encode(choices))
    return msgspec.json.encode(reply), samples


def strip(choice: dict[str, Raw], chat: Chat) -> None:
    """Take out what the caller did not ask for, leaving the engine's own default behind."""
    if not chat.keep_logprobs and "logprobs" in choice:
        choice["logprobs"] = NULL
    if not chat.keep_token_ids and "token_ids" in choice:
        choice["token_ids"] = NULL
    if not chat.keep_token_ids and "prompt_token_ids" in choice:
        choice["prompt_token_ids"] = NULL


def effective_sampling(chat: Chat, seat: Seat) -> Sampling:
    """The caller's parameters, and the engine's defaults where the caller said nothing."""
    return replace(seat.engine.sampling_defaults, **chat.sampling) if chat.sampling else seat.engine.sampling_defaults


class Sampled:
    """What one choice has sampled so far: a whole reply at once, or a stream's chunks one by one."""

    __slots__ = ("finish_reason", "logprobs", "prompt_ids", "reply", "reply_ids")

    def __init__(self, prompt_ids: list[int]) -> None:
        self.prompt_ids = prompt_ids
        self.reply_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.reply: bytes | None = None

    def add(self, choice: dict[str, Raw]) -> None:
        """Take in token ids, logprobs and the finish reason of a choice."""
        self.reply_ids += decode_ids(choice.get("token_ids", NULL)) or []
        self.prompt_ids = decode_ids(choice.get("prompt_token_ids", NULL)) or self.prompt_ids
        logprobs = _decode_logprobs(choice.get("logprobs", NULL))
        if logprobs is not None and logprobs.content:
            self.logprobs += [entry.logprob for entry in logprobs.content]
        elif logprobs is not None and logprobs.token_logprobs:
            self.logprobs += [math.nan if value is None else value for value in logprobs.token_logprobs]
        finish = bytes(choice.get("finish_reason", NULL))
        if finish != b"null":
            self.finish_reason = msgspec.json.decode(finish, type=str)

    def sample(self, index: int, chat: Chat, seat: Seat) -> Sample:
        """The row to record; one whose arrays do not agree is marked for quarantine, never mended."""
        tokens = Tokens(
            np.array(self.prompt_ids, dtype=np.int32),
            np.array(self.reply_ids, dtype=np.int32),
            np.array(self.logprobs, dtype=np.float32),
        )
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
            reply=self.reply if chat.store_text else None,
            quarantine=quarantine,
            exchange=chat.exchange(self.reply),
            extends=chat.extends,
        )
