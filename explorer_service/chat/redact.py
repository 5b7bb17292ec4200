"""The engine's JSON as the caller gets it: without the logprobs and token ids that only recording asked for.

Cut out of the bytes as they are, with null left behind, as the engine itself writes what was not asked for. In a JSON
string every quote is escaped, so that nothing that the model wrote can look like a field. On the hot path: every event
of a stream passes here.
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
_SAYS = (b'"message":', b'"delta":', b'"text":')
_IDS = b'token_ids"'
_IDS_SPACED = re.compile(rb'token_ids"(\s*:\s*)\[[^]]*\]')


def redact(json: bytes, chat: ChatRequest) -> bytes:
    """A whole reply, or an event of a stream, without what the caller did not ask for.

    Nothing is left of an event that the engine sent only to report a token whose text its tool parser holds back.
    """
    if not chat.recorded:  # nothing was added to the request
        return json
    is_event = json.startswith(b"data: ")
    if is_event and not (chat.wants_logprobs or chat.wants_token_ids) and b"{}" in json and _SILENT.search(json):
        return b""
    if not chat.wants_logprobs:
        json = _cut_logprobs(json)
    return json if chat.wants_token_ids else _cut_ids(json)


def rename(json: bytes, model: str, asked: str) -> bytes:
    """An answer that names the model as the caller did, and not as the engine knows the version that answered."""
    if model == asked:
        return json
    for field in (b'"model":"', b'"model": "'):
        json = json.replace(field + model.encode() + b'"', field + asked.encode() + b'"')
    return json


def _cut_logprobs(json: bytes) -> bytes:
    """Where vLLM writes them, after what the choice says; in JSON that is written otherwise, wherever they are."""
    cut, at = json, 0
    while (found := cut.find(_LOGPROBS, at)) >= 0:
        before, at = at, found + len(_LOGPROBS)
        if cut.startswith(b":{", at):
            end = cut.find(_AFTER_LOGPROBS, at)
            if end < 0 or all(cut.find(field, before, found) < 0 for field in _SAYS):  # it may lie between
                return _cut(json, _logprobs_of(json))
            cut = cut[: at + 1] + b"null" + cut[end + 1 :]
        elif not cut.startswith(b":null", at):
            return _cut(json, _logprobs_of(json))
    return cut


class _Choice(msgspec.Struct):
    logprobs: Raw = Raw(b"null")


class _Event(msgspec.Struct):
    choices: list[_Choice] = []


def _logprobs_of(json: bytes) -> list[Raw]:
    """Of each choice; none of what is no JSON, and goes on as it is."""
    try:
        return [choice.logprobs for choice in msgspec.json.decode(json.removeprefix(b"data: "), type=_Event).choices]
    except NO_JSON:
        return []


def _cut(text: bytes, logprobs: Iterable[Raw]) -> bytes:
    """Each of these values of `logprobs`, in their order."""
    at = 0
    for raw in logprobs:
        value = bytes(raw)
        if value != b"null":
            at = _find_value(text, value, at)
            text = text[:at] + b"null" + text[at + len(value) :]
    return text


def _find_value(text: bytes, value: bytes, at: int) -> int:
    """Where the next field `logprobs` of this value has it; a text may say the field's name too."""
    while True:
        at = text.index(value[:1], text.index(_LOGPROBS, at) + len(_LOGPROBS))
        if text.startswith(value, at):
            return at


def _cut_ids(text: bytes) -> bytes:
    """All token ids, of prompts and replies."""
    at = 0
    while (at := text.find(_IDS, at)) >= 0:
        at += len(_IDS)
        if text.startswith(b":[", at) and (end := text.find(b"]", at)) >= 0:
            text = text[: at + 1] + b"null" + text[end + 1 :]
        elif not text.startswith(b":null", at):
            return _IDS_SPACED.sub(rb'token_ids"\1null', text)
    return text
