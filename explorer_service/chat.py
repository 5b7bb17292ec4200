"""Stage 1, chat: an OpenAI request goes to an engine; token ids and the sampler's own logprobs come back.

Two surfaces: chat completions, and plain completions. The request goes on as the caller wrote it, with two fields
added; the reply comes back as the engine wrote it, with what the caller did not ask for taken out. Between the two the
sample is recorded (stage 2).
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw
from starlette.requests import Request
from starlette.responses import Response

from explorer_service.auth import Caller
from explorer_service.conversation import Digest, first_words, read_prompt
from explorer_service.deps import Deps
from explorer_service.engines.pool import Engine, Seat
from explorer_service.engines.upstream import Ask, engage, on_some_engine, read_whole
from explorer_service.errors import ApiError, bad_request, unavailable
from shared.errors import LedgerError
from shared.experience import CorruptTokens, Sample, Sampling, Tokens

VERSION_HEADER = "X-Flywheel-Version"
_NULL = Raw(b"null")
_LARGEST_TOP_K = 2**31 - 1  # what the ledger's column holds; beyond any vocabulary it says the same
_SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))


@dataclass(frozen=True, slots=True)
class Surface:
    """One of OpenAI's ways to ask."""

    path: str
    id_prefix: str  # what vLLM puts before the id that we give it
    ask_logprobs: object  # the value of `logprobs` that makes the engine tell those of the sampled tokens


CHAT = Surface("/v1/chat/completions", "chatcmpl-", True)
COMPLETION = Surface("/v1/completions", "cmpl-", 0)


@dataclass(slots=True)
class Chat:
    """One request, as far as we look into it."""

    surface: Surface
    msg_id: str
    body: dict[str, Any]
    raw: bytes
    pin: int | None
    store: bool
    stream: bool
    seeded: bool
    keep_logprobs: bool  # the caller asked for them
    keep_token_ids: bool
    sampling: dict[str, Any]  # what the caller set of Sampling's fields
    task_id: str | None
    run_id: str | None
    caller: Caller
    started: float  # time.perf_counter()
    created_at: float  # Unix seconds
    digest: Digest  # of all messages
    extends: tuple[bytes, ...]  # the exchanges that it may continue
    store_text: bool
    affinity: int  # the same for all turns of a conversation

    def ask(self, model: str) -> Ask:
        """What the engine is asked: the caller's body, and what recording needs."""
        body = {**self.body, "model": model}
        if self.store:
            body["return_token_ids"] = True
            # what is neither yes nor no, or contradicts itself, stays as it is: the engine explains it
            if not self.keep_logprobs and _is_no(body.get("logprobs")) and not body.get("top_logprobs"):
                body["logprobs"] = self.surface.ask_logprobs
        return Ask(
            self.surface.path,
            msgspec.json.encode(body),
            self.msg_id.removeprefix(self.surface.id_prefix),
            self.pin,
            self.seeded,
            self.affinity,
        )

    def exchange(self, reply: bytes | None) -> bytes | None:
        """The digest of the messages with this reply."""
        if reply is None or self.surface is not CHAT:
            return None
        digest = self.digest.copy()
        digest.add({"role": "assistant", **msgspec.json.decode(reply)})
        return digest.value()


class _Logprob(msgspec.Struct):
    logprob: float


class Logprobs(msgspec.Struct):
    """The part of a choice's logprobs that is recorded."""

    content: list[_Logprob] | None = None
    token_logprobs: list[float | None] | None = None  # of a plain completion


_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_decode_raw = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_choices = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_decode_ids = msgspec.json.Decoder(list[int] | None).decode
_decode_logprobs = msgspec.json.Decoder(Logprobs | None).decode


async def answer_chat(request: Request, deps: Deps) -> Response:
    """POST /v1/chat/completions and POST /chat."""
    return await _answer(CHAT, request, deps)


async def answer_completion(request: Request, deps: Deps) -> Response:
    """POST /v1/completions."""
    return await _answer(COMPLETION, request, deps)


async def _answer(surface: Surface, request: Request, deps: Deps) -> Response:
    caller = deps.auth.require(request, "chat")
    raw = await read_body(request, deps.config.explorer.max_body_bytes)
    chat = parse_chat(surface, raw, request, deps, caller)
    if chat.stream:
        from explorer_service.stream import stream_chat

        return await stream_chat(chat, deps)
    with caller.limit.taken():
        return await while_caller_waits(request, _answer_whole(chat, deps))


async def _answer_whole(chat: Chat, deps: Deps) -> Response:
    """Not a stream: record what was sampled, then answer."""
    ask = chat.ask(deps.config.model.name)

    async def attempt(avoid: list[Engine]) -> tuple[Response, list[Sample], Seat]:
        async with engage(ask, deps, avoid) as (seat, reply):
            content = await read_whole(reply, seat, deps)
            if reply.status != 200:
                return Response(content, reply.status, media_type=reply.content_type), [], seat
            content, samples = split_reply(content, chat, seat) if chat.store else (content, [])
            headers = {VERSION_HEADER: str(seat.version)}
            return Response(content, 200, headers, media_type="application/json"), samples, seat

    response, samples, seat = await on_some_engine(attempt, deps)
    if samples:
        await record_or_fail(samples, deps)
    deps.metrics.chat_added.observe(time.perf_counter() - chat.started - seat.engine_s)
    return response


async def while_caller_waits(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The answer; when the caller goes away before it is there, the work is cancelled, and the engine aborts."""
    answering = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(request.receive())  # the body is read: all that can still come is a disconnect
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            answering.cancel()
            await asyncio.wait((answering,))
            raise ApiError(499, "the caller went away", kind="client_closed_request")
        return answering.result()
    finally:
        answering.cancel()
        leaving.cancel()


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises ApiError 413 when it is longer than `limit` bytes, without reading on."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise ApiError(
                413, f"the body is larger than {limit} bytes (explorer.max_body_bytes)", code="body_too_large"
            )
        chunks.append(chunk)
    return b"".join(chunks)


def decode_body(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises ApiError 400 for anything else, NaN and infinity included."""
    try:
        return _decode_object(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise bad_request(f"the body is not a JSON object: {exc}") from exc


def parse_chat(surface: Surface, raw: bytes, request: Request, deps: Deps, caller: Caller) -> Chat:
    """Look at the fields that concern us; the engine judges the rest. Raises ApiError."""
    body = decode_body(raw)
    messages, limit = body.get("messages"), deps.config.explorer.max_messages
    if isinstance(messages, list) and len(messages) > limit:
        raise bad_request(f"at most {limit} messages in one chat (explorer.max_messages)", param="messages")
    metadata = body.get("metadata")
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise bad_request("metadata must be an object of strings", param="metadata")
    task_id = attribution(request.headers.get("x-flywheel-task") or metadata.get("task_id"), "task_id")
    run_id = attribution(request.headers.get("x-flywheel-run") or metadata.get("run_id"), "run_id")
    digest, extends = read_prompt(messages, caller.name, task_id, run_id)
    logprobs = body.get("logprobs")
    return Chat(
        surface=surface,
        msg_id=surface.id_prefix + uuid.uuid4().hex,
        body=body,
        raw=raw,
        pin=deps.router.parse(body.get("model")),
        store=body.get("store") is None or _flag(body["store"]),
        stream=_flag(body.get("stream")),
        seeded=body.get("seed") is not None,
        keep_logprobs=logprobs is not None if surface is COMPLETION else _flag(logprobs),
        keep_token_ids=_flag(body.get("return_token_ids")),
        sampling={name: value for name in _SAMPLING_FIELDS if (value := _number(body, name)) is not None},
        task_id=task_id,
        run_id=run_id,
        caller=caller,
        started=time.perf_counter(),
        created_at=time.time(),
        digest=digest,
        extends=extends,
        store_text=deps.config.explorer.store_text,
        affinity=first_words(messages) if len(deps.pool.engines) > 1 else 0,
    )


def _number(body: dict[str, Any], name: str) -> float | None:
    """A sampling parameter as the engine reads it; None for what it will refuse."""
    value = body.get(name)
    try:
        number = None if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if number is None or not math.isfinite(number):
        return None
    return min(max(int(number), 0), _LARGEST_TOP_K) if name == "top_k" else number


def _is_no(value: Any) -> bool:
    """Whether the engine reads this as no, or as nothing said."""
    return value in (None, False, 0) or (
        isinstance(value, str) and value.lower() in ("0", "false", "f", "off", "no", "n")
    )


def _flag(value: Any) -> bool:
    """A yes or no as the engine reads it: pydantic's lax booleans."""
    return value in (True, 1) or (isinstance(value, str) and value.lower() in ("1", "true", "t", "on", "yes", "y"))


def attribution(value: object, name: str) -> str | None:
    """A task or run id as text; integers are taken as their digits. Raises ApiError 400."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise bad_request(f"{name} must be a string or an integer", param=name)
    text = str(value)
    if len(text) > 400 or "\x00" in text:
        raise bad_request(f"{name} must be at most 400 characters, without NUL", param=name)
    return text


def split_reply(content: bytes, chat: Chat, seat: Seat) -> tuple[bytes, list[Sample]]:
    """The engine's reply as the caller gets it, and a sample for each choice."""
    try:
        reply = _decode_raw(content)
        choices = _decode_choices(reply["choices"])
    except (msgspec.DecodeError, KeyError) as exc:
        raise unavailable(f"engine {seat.engine.name} gave a reply that is no chat completion", "engine_reply") from exc
    prompt_ids = _decode_ids(reply.get("prompt_token_ids", _NULL)) or []
    samples = []
    for choice in choices:
        sampled = Sampled(prompt_ids)
        sampled.add(choice)
        sampled.reply = bytes(choice.get("message") or choice.get("text", _NULL))
        samples.append(sampled.sample(int(bytes(choice["index"])), chat, seat))
        strip(choice, chat)
    if not chat.keep_token_ids and "prompt_token_ids" in reply:
        reply["prompt_token_ids"] = _NULL
    reply["choices"] = Raw(msgspec.json.encode(choices))
    return msgspec.json.encode(reply), samples


def strip(choice: dict[str, Raw], chat: Chat) -> None:
    """Take out what the caller did not ask for, leaving the engine's own default behind."""
    if not chat.keep_logprobs and "logprobs" in choice:
        choice["logprobs"] = _NULL
    if not chat.keep_token_ids and "token_ids" in choice:
        choice["token_ids"] = _NULL
    if not chat.keep_token_ids and "prompt_token_ids" in choice:
        choice["prompt_token_ids"] = _NULL


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
        self.reply_ids += _decode_ids(choice.get("token_ids", _NULL)) or []
        self.prompt_ids = _decode_ids(choice.get("prompt_token_ids", _NULL)) or self.prompt_ids
        logprobs = _decode_logprobs(choice.get("logprobs", _NULL))
        if logprobs is not None and logprobs.content:
            self.logprobs += [entry.logprob for entry in logprobs.content]
        elif logprobs is not None and logprobs.token_logprobs:
            self.logprobs += [math.nan if value is None else value for value in logprobs.token_logprobs]
        finish = bytes(choice.get("finish_reason", _NULL))
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


async def record_or_fail(samples: list[Sample], deps: Deps) -> None:
    """Make samples durable. A caller who goes away meanwhile does not undo it. Raises ApiError 503."""
    if not samples:  # the engine's stream held an error and no choice
        return
    try:
        await asyncio.shield(deps.recorder.record(samples))
    except LedgerError as exc:
        raise unavailable(f"the reply could not be recorded: {exc}", "not_recorded") from exc
