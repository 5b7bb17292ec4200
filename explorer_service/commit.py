"""Stage 4, commit: rewarded rows become ready for training, in one scoped transaction."""

from __future__ import annotations

import math

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from explorer_service.deps import Deps
from explorer_service.errors import bad_request, unavailable
from explorer_service.request import attribution, decode_body, for_parser_of, read_body
from shared.errors import LedgerError
from shared.ledger import transitions

# A threshold above this is milliseconds: as seconds it would lie after the year 5000.
_MILLISECONDS_ABOVE = 1e11


class CommitBody(msgspec.Struct):
    """The scope; with none of it, everything."""

    task_id: str | int | None = None
    run_id: str | int | None = None
    time_threshold: float | None = None


async def answer_commit(request: Request, deps: Deps) -> Response:
    """POST /commit."""
    caller = deps.auth.require(request, "feedback")
    with caller.limit.taken():
        return await _answer_within_limit(request, deps, caller.group)


async def _answer_within_limit(request: Request, deps: Deps, key_group: str | None) -> Response:
    scope = parse_commit(await read_body(request, deps.config.explorer))
    task_id, run_id = attribution(scope.task_id, "task_id"), attribution(scope.run_id, "run_id")
    before = scope.time_threshold
    if before is not None and before > _MILLISECONDS_ABOVE:
        before /= 1000
    try:
        committed, ready = await deps.recorder.write(
            lambda connection: transitions.commit(
                connection, task_id=task_id, run_id=run_id, before=before, key_group=key_group
            )
        )
    except LedgerError as exc:
        raise unavailable(f"the commit could not be stored: {exc}", "not_stored") from exc
    deps.metrics.commit_rows.inc(committed)
    answer = {"status": "success", "committed": committed, "ready": ready}
    return Response(msgspec.json.encode(for_parser_of(request, answer)), media_type="application/json")


def parse_commit(raw: bytes) -> CommitBody:
    """No body, null or an object. Raises ApiError 400."""
    if not raw.strip() or raw.strip() == b"null":
        return CommitBody()
    decode_body(raw)
    try:
        scope = msgspec.json.decode(raw, type=CommitBody)
    except msgspec.ValidationError as exc:
        raise bad_request(str(exc)) from exc
    if scope.time_threshold is not None and not math.isfinite(scope.time_threshold):
        raise bad_request("time_threshold must be a finite number", param="time_threshold")
    return scope
