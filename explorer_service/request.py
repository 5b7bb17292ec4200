"""What a chat asks for, as far as we look into it: the engine judges the rest.

Parameters are read as the engine reads them (pydantic's lax numbers and booleans), so that what is recorded is what was
used, and what the engine will refuse is left for it to refuse.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, fields
from typing import Any

import msgspec
from starlette.requests import HTTPConnection, Request

from explorer_service.auth import Caller
from explorer_service.conversation import Digest, first_words, read_prompt
from explorer_service.deps import Deps
from explorer_service.engines.upstream import Ask
from explorer_service.errors import ApiError, bad_request, body_too_large, body_too_slow
from shared.config import ExplorerConfig
from shared.experience import Sampling, new_message_id

_LARGEST_TOP_K = 2**31 - 1  # what the ledger's column holds; beyond any vocabulary it says the same
_SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


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

    def exchange(self, reply: bytes) -> bytes | None:
        """The digest of the messages with this one, of JSON. Raises msgspec.DecodeError when it is no object."""
        if self.surface is not CHAT:
            return None
        return self.digest.copy().add_reply({"role": "assistant", **_decode_object(reply)})


async def read_body(request: Request, config: ExplorerConfig) -> bytes:
    """The whole body.

    Raises ApiError 413 when it is longer than `max_body_bytes`, without reading on; 408 when it takes longer than
    `body_timeout_s`; 499 when the caller goes away.
    """
    chunks, size, limit, more = [], 0, config.max_body_bytes, True
    try:
        async with asyncio.timeout(config.body_timeout_s):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(499, "the caller went away", kind="client_closed_request")
                chunk, more = message.get("body", b""), message.get("more_body", False)
                size += len(chunk)
                if size > limit:
                    raise body_too_large(limit)
                chunks.append(chunk)
    except TimeoutError:
        raise body_too_slow(config.body_timeout_s) from None
    return b"".join(chunks)


def decode_body(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises ApiError 400 for anything else, NaN and infinity included."""
    try:
        return _decode_object(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise bad_request(f"the body is not a JSON object: {exc}") from exc


def for_parser_of(request: Request, answer: Any) -> Any:
    """The answer to feedback or a commit; of a success only its status to AgentScope Java's training client.

    That client reads it with a parser that takes an unknown field for a failure of what has long been stored. It is
    known by OkHttp's User-Agent without an Accept header; any other user of OkHttp gets the whole by naming one.
    """
    strict = request.headers.get("user-agent", "").startswith("okhttp/") and "accept" not in request.headers
    return {"status": "success"} if strict else answer


def parse_chat(surface: Surface, raw: bytes, request: HTTPConnection, deps: Deps, caller: Caller) -> Chat:
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
        msg_id=new_message_id(surface.id_prefix),
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
