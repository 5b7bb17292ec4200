"""Remove the logprobs and token ids that only recording requested from the engine's JSON.

It edits the bytes: each value becomes null, as the engine writes values that were not requested. JSON escapes every
quote in a string, so text of the model cannot look like a field. On the hot path: called for every event of a stream.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
from msgspec import Raw

from explorer_service.chat.request import ChatRequest
from explorer_service.errors import NO_JSON

_LOGPROBS, _AFTER_LOGPROBS = b'"logprobs"', b'},"finish_reason":'
_SILENT = re.compile(rb'^data: (?=.*"delta"\s*:\s*\{\}).*"finish_reason"\s*:\s*null')
_IDS = b'token_ids"'
_IDS_SPACED = re.compile(rb'token_ids"(\s*:\s*)\[[^]]*\]')


def redact(json: bytes, chat: ChatRequest) -> bytes:
    """Return a whole reply, or an event of a stream, without the values that the caller did not request.

    Returns nothing for an event that only reports a token whose text the engine's tool parser buffers.
    """
    if not chat.recorded:  # the request was forwarded without added fields
        return json
    is_event = json.startswith(b"data: ")
    if is_event and not (chat.wants_logprobs or chat.wants_token_ids) and b"{}" in json and _SILENT.search(json):
        return b""
    if not chat.wants_logprobs:
        json = _cut_logprobs(json)
    return json if chat.wants_token_ids else _cut_ids(json)


def rename(json: bytes, model: str, asked: str) -> bytes:
    """Replace the engine's name of the model with the name that the caller sent."""
    if model == asked:
        return json
    for field in (b'"model":"', b'"model": "'):
        json = json.replace(field + model.encode() + b'"', field + asked.encode() + b'"')
    return json


def _cut_logprobs(json: bytes) -> bytes:
    """Cut the logprobs where vLLM writes them, before the finish reason; in other JSON, find them by decoding."""
    kept = b""  # the result before `begin`; short, so the text after a choice is not copied for each choice
    begin = at = 0
    while (found := json.find(_LOGPROBS, at)) >= 0:
        at = found + len(_LOGPROBS)
        if json.startswith(b":{", at):
            end = json.find(_AFTER_LOGPROBS, at)
            if end < 0 or not _is_value(json[at + 1 : end + 1]):  # another field, or another choice, may be inside
                return _cut(json, _logprobs_of(json))
            kept += json[begin : at + 1] + b"null"
            begin = at = end + 1
        elif not json.startswith(b":null", at):
            return _cut(json, _logprobs_of(json))
    return kept + json[begin:] if begin else json


def _is_value(json: bytes) -> bool:
    """Whether the bytes are one value, with nothing after it."""
    try:
        _decode_value(json)
    except NO_JSON:
        return False
    return True


class _Choice(msgspec.Struct):
    logprobs: Raw = Raw(b"null")


class _Event(msgspec.Struct):
    choices: list[_Choice] = []


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_value = msgspec.json.Decoder(Raw).decode


def _logprobs_of(json: bytes) -> list[Raw]:
    """Return the logprobs of each choice; none if the bytes are not JSON, which stay unchanged."""
    try:
        return [choice.logprobs for choice in _decode_event(json.removeprefix(b"data: ")).choices]
    except NO_JSON:
        return []


def _cut(text: bytes, logprobs: Iterable[Raw]) -> bytes:
    """Replace these values of `logprobs`, in their order, with null."""
    kept = b""
    begin = 0
    for raw in logprobs:
        value = bytes(raw)
        if value != b"null":
            at = _find_value(text, value, begin)
            kept += text[begin:at] + b"null"
            begin = at + len(value)
    return kept + text[begin:] if begin else text


def _find_value(text: bytes, value: bytes, at: int) -> int:
    """Return the position of this value in its field `logprobs`. Texts may contain the field's name, too."""
    while True:
        at = text.index(value[:1], text.index(_LOGPROBS, at) + len(_LOGPROBS))
        if text.startswith(value, at):
            return at


def _cut_ids(text: bytes) -> bytes:
    """Replace all token ids, of prompts and replies, with null."""
    kept = b""
    begin = at = 0
    while (at := text.find(_IDS, at)) >= 0:
        at += len(_IDS)
        if text.startswith(b":[", at) and (end := text.find(b"]", at)) >= 0:
            kept += text[begin : at + 1] + b"null"
            begin = at = end + 1
        elif not text.startswith(b":null", at):
            return _IDS_SPACED.sub(rb'token_ids"\1null', text)
    return kept + text[begin:] if begin else text
