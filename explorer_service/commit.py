"""Stage 4, commit: make trajectories with signals ready, in a series of short transactions."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from explorer_service.api.answer import json_answer
from explorer_service.api.body import decode_typed, ignored_fields
from explorer_service.api.compat import agentscope_java_answer
from explorer_service.chat.request import read_id
from explorer_service.deps import Deps
from explorer_service.ledger_writer import LedgerWriter, WriteInParts
from explorer_service.metrics import ExplorerMetrics
from shared.ledger import transitions
from shared.ledger.queries import count_ready

# A threshold above this is in milliseconds: in seconds, it would be after the year 5000.
_MILLISECONDS_ABOVE = 1e11


class CommitBody(msgspec.Struct):
    """The scope of a commit; without any field, all rows."""

    task_id: str | int | None = None
    run_id: str | int | None = None
    time_threshold: float | None = None


_NO_BODY = (b"", b"null")
_decode_commit = msgspec.json.Decoder(CommitBody).decode


async def answer_commit(request: Request, deps: Deps) -> Response:
    """POST /commit."""
    caller = deps.auth.require(request, "feedback", open_to_networks=True)
    with caller.limit.taken():
        raw = await deps.bodies.read(request)
        scope = parse_commit(raw)
        ignored = [] if raw.strip() in _NO_BODY else ignored_fields(raw, scope)
        task_id, run_id = read_id(scope.task_id, "task_id"), read_id(scope.run_id, "run_id")
        before = scope.time_threshold
        if before is not None and before > _MILLISECONDS_ABOVE:
            before /= 1000
        where = {"task_id": task_id, "run_id": run_id, "before": before, "key_group": caller.group}
        committed, ready = await commit_rows(deps.feedback_writer, deps.metrics, **where)
    answer: dict[str, Any] = {"status": "success", "committed": committed, "ready": ready}
    if ignored:
        answer["ignored"] = ignored
    return json_answer(agentscope_java_answer(request, answer))


async def commit_rows(writer: LedgerWriter, metrics: ExplorerMetrics, **scope: Any) -> tuple[int, int]:
    """Commit the rows of a scope in parts, and count them. Returns (rows made ready, all ready rows).

    Raises LedgerError. After an error, the parts before it stay committed; a repeat commits the rest.
    """
    committed, ready, parts = 0, 0, WriteInParts(writer)
    last_id: int | None = 0
    while last_id is not None:

        def part(connection: Connection, after_id: int = last_id) -> tuple[int, int | None, int]:
            count, next_id = transitions.commit_part(connection, **scope, after_id=after_id)
            return count, next_id, 0 if next_id is not None else count_ready(connection)

        count, last_id, ready = await parts.write(part)
        metrics.commit_rows.inc(count)
        committed += count
    return committed, ready


def parse_commit(raw: bytes) -> CommitBody:
    """Parse a body that is empty, null or an object. Raises ApiError 400."""
    if raw.strip() in _NO_BODY:
        return CommitBody()
    return decode_typed(raw, _decode_commit)
