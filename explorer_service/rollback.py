"""POST /rollback: an operator goes back to an earlier version."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from explorer_service.api.body import decode_typed, ignored_fields
from explorer_service.api.errors import bad_request
from explorer_service.deps import Deps
from shared.ledger import transitions
from shared.versions import LARGEST_VERSION


class RollbackBody(msgspec.Struct):
    """The body of POST /rollback. Unknown fields are ignored, and listed in the answer."""

    to: int
    again: bool = False  # train again on the rows that only rejected versions were trained on


class Answer(msgspec.Struct):
    """The answer to a rollback."""

    status: str
    to: int
    rejected: list[int]  # versions
    trainers: dict[str, bool]  # those that start again; whether with the optimizer's state of that version
    rows: int  # READY again
    ignored: list[str] | msgspec.UnsetType = msgspec.UNSET


_decode_rollback = msgspec.json.Decoder(RollbackBody).decode


async def answer_rollback(request: Request, deps: Deps) -> Response:
    """POST /rollback. Engines load the version as soon as the ledger is polled; the answer does not wait for them."""
    caller = deps.auth.require(request, "admin")
    with caller.limit.taken():
        raw = await deps.bodies.read(request)
        body = decode_typed(raw, _decode_rollback)
        if not 0 <= body.to <= LARGEST_VERSION:
            raise bad_request("to must be the number of a version", "to")
        by = "operator" if caller.name is None else f"operator with key {caller.name}"
        roll_back = partial(transitions.roll_back, to=body.to, again=body.again, by=by)
        done = await deps.feedback_writer.write(roll_back)
    ignored = ignored_fields(raw, body) or msgspec.UNSET
    answer = Answer("success", done.to, done.rejected, done.trainers, done.rows, ignored)
    return Response(msgspec.json.encode(answer), media_type="application/json")
