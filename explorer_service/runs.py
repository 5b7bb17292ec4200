"""Read the recorded rows of a run."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from explorer_service.api.answer import json_answer
from explorer_service.api.errors import bad_request
from explorer_service.api.paging import MAX_ROWS, read_place
from explorer_service.chat.request import read_id
from explorer_service.deps import Deps
from shared.ledger.queries import list_run


async def answer_runs(request: Request, deps: Deps) -> Response:
    """GET /runs?task_id=&run_id=: the rows of a run, or of all runs of a task, that the caller's key reaches."""
    caller = deps.auth.require(request, "feedback")
    asked = request.query_params
    task_id, run_id = read_id(asked.get("task_id"), "task_id"), read_id(asked.get("run_id"), "run_id")
    if task_id is None:
        raise bad_request("name the task: /runs?task_id=…, with run_id for one of its runs", "task_id")
    of_task = partial(list_run, task_id=task_id, run_id=run_id, key_group=caller.group)
    with caller.limit.taken():
        rows = await deps.reader.read(partial(of_task, after_id=read_place(request, "after") or 0, at_most=MAX_ROWS))
    following = rows[-1].id if len(rows) == MAX_ROWS else None
    return json_answer({"rows": [row.shown() for row in rows], "next": following})
