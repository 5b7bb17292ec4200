"""The routes of an operator, who decides which versions serve: PUT /traffic, promotion and rollback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from explorer_service.api.answer import json_answer
from explorer_service.api.auth import Caller
from explorer_service.api.body import decode_typed, ignored_fields
from explorer_service.api.errors import bad_request
from explorer_service.deps import Deps
from shared.ledger import transitions


class TrafficBody(msgspec.Struct):
    """The body of PUT /traffic. Unknown fields are ignored, and listed in the answer."""

    weights: dict[int, float] | None  # by version; null: the newest version gets all chats


class RollbackBody(msgspec.Struct):
    """The body of POST /rollback. Unknown fields are ignored, and listed in the answer."""

    to: int
    again: bool = False  # train again on the rows that only rejected versions were trained on


_decode_traffic = msgspec.json.Decoder(TrafficBody).decode
_decode_rollback = msgspec.json.Decoder(RollbackBody).decode


async def answer_traffic(request: Request, deps: Deps) -> Response:
    """PUT /traffic: divide the chats that name no version. The answer waits for no engine."""
    caller = deps.auth.require(request, "admin")
    with caller.limit.taken():
        raw = await deps.bodies.read(request)
        body = decode_typed(raw, _decode_traffic)
        if body.weights is not None and not body.weights:
            raise bad_request("name a version with its weight, or null for the newest one", "weights")
        ignored = ignored_fields(raw, body)
        return _answer(await _share(body.weights or {}, caller, deps), ignored)


async def answer_promote(request: Request, deps: Deps) -> Response:
    """POST /versions/N/promote: all chats that name no version to this one. The body is not used."""
    caller = deps.auth.require(request, "admin")
    with caller.limit.taken():
        await deps.bodies.read(request)
        version = request.path_params["version"]
        if not (version.isascii() and version.isdigit() and len(version) < 20):
            raise bad_request("the version in the path must be a number", "version")
        return _answer(await _share({int(version): 1.0}, caller, deps), [])


async def _share(weights: Mapping[int, float], caller: Caller, deps: Deps) -> dict[str, Any]:
    at_most, needed = deps.config.versions_served, deps.config.needed_to_serve_more
    change = partial(transitions.share_traffic, weights=weights, at_most=at_most, by=_operator(caller), needed=needed)
    shares = await deps.feedback_writer.write(change)
    return {"traffic": {str(version): share for version, share in shares.items()}}


async def answer_rollback(request: Request, deps: Deps) -> Response:
    """POST /rollback. Engines load the version as soon as the ledger is polled; the answer does not wait for them."""
    caller = deps.auth.require(request, "admin")
    with caller.limit.taken():
        raw = await deps.bodies.read(request)
        body = decode_typed(raw, _decode_rollback)
        ignored = ignored_fields(raw, body)
        roll_back = partial(
            transitions.roll_back, to=body.to, again=body.again, by=_operator(caller), rule=deps.config.reward
        )
        return _answer(asdict(await deps.feedback_writer.write(roll_back)), ignored)


def _operator(caller: Caller) -> str:
    """Return who decides, for the ledger."""
    return "operator" if caller.name is None else f"operator with key {caller.name}"


def _answer(done: Mapping[str, Any], ignored: list[str]) -> Response:
    return json_answer({"status": "success", **done, **({"ignored": ignored} if ignored else {})})
