"""POST /rollback: an operator goes back to an earlier version."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from explorer_service.api.body import decode_typed, ignored_fields
from explorer_service.deps import Deps
from shared.ledger import transitions


class RollbackBody(msgspec.Struct):
    """The body of POST /rollback. Unknown fields are ignored, and listed in the answer."""

    to: int
    again: bool = False  # train again on the rows that only rejected versions were trained on


_decode_rollback = msgspec.json.Decoder(RollbackBody).decode


async def answer_rollback(request: Request, deps: Deps) -> Response:
    """POST /rollback. Engines load the version as soon as the ledger is polled; the answer does not wait for them."""
    caller = deps.auth.require(request, "admin")
    with caller.limit.taken():
        raw = await deps.bodies.read(request)
        body = decode_typed(raw, _decode_rollback)
        ignored = ignored_fields(raw, body)
        by = "operator" if caller.name is None else f"operator with key {caller.name}"
        roll_back = partial(transitions.roll_back, to=body.to, again=body.again, by=by)
        done = await deps.feedback_writer.write(roll_back)
    answer = {"status": "success", **asdict(done), **({"ignored": ignored} if ignored else {})}
    return Response(msgspec.json.encode(answer), media_type="application/json")
