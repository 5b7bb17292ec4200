"""Parse the fields of a chat request that the explorer needs. The engine validates the rest.

Parameters are parsed as the engine parses them (pydantic's lax numbers and booleans), so that the record matches what
the engine used. Invalid values are left for the engine to reject.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import unquote

from explorer_service.api.auth import Caller
from explorer_service.api.body import decode_body
from explorer_service.api.errors import bad_request
from explorer_service.chat.conversation import Digest, conversation_affinity, read_prompt
from explorer_service.engines.dispatch import EngineRequest
from explorer_service.traffic.router import Route, Router
from shared.config import Config
from shared.experience import LARGEST_TOP_K, Sampling, new_message_id
from shared.ledger.conditions import MAX_ID_BYTES

_LOWEST_TEMPERATURE = 0.01  # vLLM raises lower values to this, except 0, which is greedy
# Parts of a message that vLLM accepts and that the prompt's token ids do not contain.
_NOT_TEXT = frozenset((
    "prompt_embeds", "image_url", "image_embeds", "image_pil", "input_image", "input_audio", "audio_url",
    "audio_embeds", "video_url", "video_embeds", "file",
))  # fmt: skip
_SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling) if field.name != "masked")
# Parameters that force or forbid tokens, also in older vLLM: the trainer cannot recompute such logprobs.
_MASKS = (
    "structured_outputs", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens", "watermarking",
    "vllm_xargs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
# Tool parsers of vLLM that constrain calls by a grammar in every request with tools.
_CONSTRAINING_PARSERS = ("glm45", "glm47", "cohere_command3", "cohere_command4")


@dataclass(frozen=True, slots=True)
class Surface:
    """One of OpenAI's routes that sample."""

    path: str
    id_prefix: str  # vLLM puts it before the request id
    logprobs: object  # value of `logprobs` for which the engine returns those of the sampled tokens
    has_messages: bool


CHAT = Surface("/v1/chat/completions", "chatcmpl-", logprobs=True, has_messages=True)
COMPLETION = Surface("/v1/completions", "cmpl-", logprobs=0, has_messages=False)


@dataclass(frozen=True, slots=True)
class Attribution:
    """The task, run, caller and conversation of a sample."""

    task_id: str | None
    run_id: str | None
    caller: Caller
    digest: Digest  # of all messages
    extends: tuple[bytes, ...]  # the exchanges that it may continue, longest first


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One parsed request."""

    surface: Surface
    msg_id: str
    body: dict[str, Any]
    text: bytes | None  # the body's bytes, to be stored; None with explorer.store_text: false
    route: Route
    recorded: bool
    stream: bool
    wants_logprobs: bool
    wants_token_ids: bool
    choices: int  # that the reply has, each a row
    sampling: dict[str, Any]  # the fields of Sampling that the caller set
    attribution: Attribution
    received_at: float  # time.perf_counter()
    created_at: float  # Unix seconds, by the database's clock
    preferred: int | None = None  # the version that should answer if the caller names none; None: the leading one

    def engine_request(self) -> EngineRequest:
        """Return the request for the engine: the caller's body, with the fields that recording needs."""
        body = self.body
        if self.recorded:  # invalid values stay unchanged: the engine's error explains them
            body = dict(body)
            if _is_false(body.get("return_token_ids")):
                body["return_token_ids"] = True
            if not self.wants_logprobs and _is_false(body.get("logprobs")) and not self._requests_other_logprobs():
                body["logprobs"] = self.surface.logprobs
        return EngineRequest(
            path=self.surface.path,
            body=body,
            request_id=self.msg_id.removeprefix(self.surface.id_prefix),
            version=self.route.version,
            preferred=self.preferred,
            seeded=body.get("seed") is not None,
            affinity=self.route.affinity,
            unknown_model=self.route.unknown_model,
            is_chat=True,
        )

    def _requests_other_logprobs(self) -> bool:
        """Whether another field requests logprobs, although `logprobs` does not."""
        top_logprobs = self.surface.has_messages and self.body.get("top_logprobs")
        return bool(top_logprobs or self.body.get("logprob_token_ids"))


def parse_chat(
    surface: Surface,
    raw: bytes,
    headers: Mapping[str, str],
    caller: Caller,
    router: Router,
    config: Config,
    names: Mapping[str, str],
    created_at: float,
) -> ChatRequest:
    """Parse the fields that the explorer needs; the engine validates the rest. Raises ApiError.

    names: `task` and `run` from the path, percent-encoded. created_at: the request's time, by the database's clock.
    """
    received_at, settings = time.perf_counter(), config.explorer
    body = decode_body(raw)
    messages = body.get("messages") if surface.has_messages else None
    if isinstance(messages, list) and len(messages) > settings.max_messages:
        raise bad_request(f"at most {settings.max_messages} messages in one chat (explorer.max_messages)", "messages")
    _check_types(body)
    affinity = conversation_affinity(messages) if router.uses_affinity else 0
    logprobs = body.get("logprobs")
    return ChatRequest(
        surface=surface,
        msg_id=new_message_id(surface.id_prefix),
        body=body,
        text=raw if settings.store_text else None,
        route=router.choose(body.get("model"), affinity),
        recorded=(body.get("store") is None or _is_true(body["store"])) and _can_be_recorded(surface, body),
        stream=_is_true(body.get("stream")),
        wants_logprobs=_is_true(logprobs) if surface.has_messages else logprobs is not None,
        wants_token_ids=_is_true(body.get("return_token_ids")),
        choices=_count_choices(surface, body, settings.max_choices),
        sampling=_read_sampling(body, config.engine.tool_parser),
        attribution=_attribute(body, messages, headers, names, caller),
        received_at=received_at,
        created_at=created_at,
    )


def _check_types(body: dict[str, Any]) -> None:
    """Raise ApiError 400 for what the engine would not refuse: it ignores `store`, and answers the others with 500."""
    store = body.get("store")
    tools = body.get("tools") if isinstance(body.get("tool_choice"), dict) else None
    if not (_is_true(store) or _is_false(store)):
        raise bad_request("store must be true or false", "store")
    if not isinstance(body.get("structured_outputs"), dict | None):
        raise bad_request("structured_outputs must be an object", "structured_outputs")
    if isinstance(tools, list) and not all("name" in _function_of(tool) for tool in tools):
        raise bad_request('each of tools must be {"type": "function", "function": {"name": …}}', "tools")


def _read_sampling(body: dict[str, Any], tool_parser: str | None) -> dict[str, Any]:
    """Return the fields of Sampling that the caller set."""
    sampling: dict[str, Any] = {name: value for name in _SAMPLING_FIELDS if (value := _number(body, name)) is not None}
    return {**sampling, "masked": True} if _is_masked(body, tool_parser) else sampling


def _is_masked(body: dict[str, Any], tool_parser: str | None) -> bool:
    """Whether the request may mask tokens that have a probability above 0."""
    form, choice, tools = body.get("response_format"), body.get("tool_choice"), body.get("tools")
    return (
        any(body.get(name) for name in _MASKS)
        or body.get("thinking_token_budget") not in (None, -1)  # -1: unlimited; 0: the thought ends at once
        or (isinstance(form, dict) and form.get("type") != "text")
        or choice == "required"
        or isinstance(choice, dict)
        or (bool(tools) and body.get("parallel_tool_calls") is not None and _is_false(body["parallel_tool_calls"]))
        or (bool(tools) and choice != "none" and tool_parser in _CONSTRAINING_PARSERS)
        or (isinstance(tools, list) and any(_function_of(tool).get("strict") for tool in tools))
    )


def _function_of(tool: Any) -> dict[str, Any]:
    """Return a tool's function; empty if it has none."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return function if isinstance(function, dict) else {}


def _count_choices(surface: Surface, body: dict[str, Any], most: int) -> int:
    """Return the number of choices: `n` for each prompt of a list. Raises ApiError 400 for more than `most`."""
    prompts = None if surface.has_messages else body.get("prompt")
    if body.get("n") is None and not isinstance(prompts, list):
        return 1
    asked = _number(body, "n") or 1
    if isinstance(prompts, list) and not all(isinstance(part, int) for part in prompts):  # integers: one prompt's ids
        asked *= len(prompts)
    if asked > most:
        raise bad_request(f"at most {most} choices in one request (explorer.max_choices)", "n")
    return max(1, int(asked))


def _attribute(
    body: dict[str, Any], messages: Any, headers: Mapping[str, str], names: Mapping[str, str], caller: Caller
) -> Attribution:
    metadata = body.get("metadata")
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise bad_request("metadata must be an object of strings", "metadata")
    task, run = (_from_path(names, name) or _header_text(headers, f"x-flywheel-{name}") for name in ("task", "run"))
    task_id = read_id(task or metadata.get("task_id"), "task_id")
    run_id = read_id(run or metadata.get("run_id"), "run_id")
    digest, extends = read_prompt(messages, caller.name, task_id, run_id)
    return Attribution(task_id, run_id, caller, digest, extends)


def _from_path(names: Mapping[str, str], name: str) -> str | None:
    """Return a name from the path, decoded. Raises ApiError 400."""
    try:
        return unquote(names[name], errors="strict") if name in names else None
    except UnicodeDecodeError as exc:
        raise bad_request(f"the {name} in the path is not percent-encoded UTF-8", f"{name}_id") from exc


def _header_text(headers: Mapping[str, str], name: str) -> str | None:
    """Return a header's value, decoded as UTF-8, like JSON; or else as Latin-1, which older clients send."""
    value = headers.get(name)  # Starlette decodes every value as Latin-1
    value = value and value.rstrip(" \t")  # the server removes only the spaces before a value
    if value is None or value.isascii():
        return value
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return value


def _can_be_recorded(surface: Surface, body: dict[str, Any]) -> bool:
    """Whether a request for token ids does not change the reply, and the ids are what the policy sampled.

    With token ids, vLLM omits the echo of a prompt, and would reveal hidden reasoning. A beam is not a sample of the
    policy. Images and embeddings are not tokens.
    """
    if _is_true(body.get("use_beam_search")):
        return False
    if not surface.has_messages:
        return not _is_true(body.get("echo")) and body.get("prompt_embeds") is None
    if body.get("include_reasoning") is not None and _is_false(body["include_reasoning"]):
        return False
    messages = body.get("messages")
    return not any(_is_more_than_text(message) for message in (messages if isinstance(messages, list) else ()))


def _is_more_than_text(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and any(
        isinstance(part, dict) and (str(part.get("type")) in _NOT_TEXT or not _NOT_TEXT.isdisjoint(part))
        for part in content
    )


def read_id(value: object, name: str) -> str | None:
    """Return a task or run id as text, an integer as its digits; None for an empty one. Raises ApiError 400."""
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise bad_request(f"{name} must be a string or an integer", name)
    text = str(value)
    if len(text) > 400 or "\x00" in text or len(text.encode(errors="replace")) > MAX_ID_BYTES:
        raise bad_request(f"{name} must be at most 400 characters and {MAX_ID_BYTES} bytes, without NUL", name)
    return text


def _number(body: dict[str, Any], name: str) -> float | None:
    """Return a sampling parameter as the engine parses it; None if it is not set, or the engine will reject it."""
    value = body.get(name)
    try:
        number = None if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if number is None or not math.isfinite(number):
        return None
    if name == "temperature" and 0 < number < _LOWEST_TEMPERATURE:
        return _LOWEST_TEMPERATURE
    return min(max(int(number), 0), LARGEST_TOP_K) if name == "top_k" else number


def _is_false(value: Any) -> bool:
    """Whether the engine parses this as false, or as not set."""
    return value in (None, False, 0) or (
        isinstance(value, str) and value.lower() in ("0", "false", "f", "off", "no", "n")
    )


def _is_true(value: Any) -> bool:
    """Whether the engine parses this as true, by pydantic's lax booleans."""
    return value in (True, 1) or (isinstance(value, str) and value.lower() in ("1", "true", "t", "on", "yes", "y"))
