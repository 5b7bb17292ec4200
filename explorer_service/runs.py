"""Read the recorded rows of a run."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from explorer_service.api.errors import bad_request
from explorer_service.chat.request import read_id
from explorer_service.deps import Deps
from shared.ledger.queries import list_run

MAX_ROWS = 1000  # in one answer
_LARGEST_ID = 2**63 - 1


async def answer_runs(request: Request, deps: Deps) -> Response:
    """GET /runs?task_id=&run_id=: the rows of a run, or of all runs of a task, that the caller's key reaches."""
    caller = deps.auth.require(request, "feedback")
    asked = request.query_params
    task_id, run_id = read_id(asked.get("task_id"), "task_id"), read_id(asked.get("run_id"), "run_id")
    if task_id is None:
        raise bad_request("name the task: /runs?task_id=…, with run_id for one of its runs", "task_id")
    of_task = partial(list_run, task_id=task_id, run_id=run_id, key_group=caller.group)
    with caller.limit.taken():
        rows = await deps.reader.read(partial(of_task, after_id=_read_after(asked.get("after")), at_most=MAX_ROWS))
    following = rows[-1].id if len(rows) == MAX_ROWS else None
    answer = {"rows": [row.shown() for row in rows], "next": following}
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _read_after(value: str | None) -> int:
    """Parse the id at which the previous answer ended. Raises ApiError 400."""
    if value is None:
        return 0
    if not (value.isascii() and value.isdigit() and len(value) < 20 and int(value) <= _LARGEST_ID):
        raise bad_request("after must be the `next` of the previous answer", "after")
    return int(value)
