"""The feedback of a run, as requests that count once each."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flywheel.errors import NothingKnown, NothingRecorded
from flywheel.wire import Steps, encode, send_feedback

if TYPE_CHECKING:
    from flywheel.run import Run

log = logging.getLogger("flywheel")
Feedback = tuple[str, dict[str, Any]]  # Idempotency-Key and body


def keyed(name: str, bodies: Sequence[dict[str, Any]]) -> list[Feedback]:
    """Return the bodies with Idempotency-Keys; another body has another key, because one key stands for one request.

    Raises ConfigError for a body that is no JSON.

    >>> keyed("run", [{"reward": 1.0}]) == keyed("run", [{"reward": 1.0}]) != keyed("run", [{"reward": 0.5}])
    True
    """
    return [(f"{name}-{_digest(body)}", body) for body in bodies]


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(encode(body)).hexdigest()[:16]


def send_all(feedback: Sequence[Feedback], retry_s: float) -> Steps[bool]:
    """Send the feedback about a run, its turns and its children. Returns False if the explorer knows none of them.

    If it knows only some of them, the others, such as a child without chats, are logged.
    """
    unknown = []
    for key, body in feedback:
        try:
            yield from send_feedback(body, key, False, retry_s)
        except NothingKnown:
            unknown.append(body)
    if unknown and len(unknown) == len(feedback):
        return False
    for body in unknown:
        about = f"run {body['run_id']!r} of task {body['task_id']!r}" if body.get("run_id") else body.get("msg_ids")
        log.warning("what was said of %s reached nothing: the explorer recorded no chat of it", about)
    return True


def nothing_recorded(run: Run) -> NothingRecorded:
    """Return the error for a run of which the explorer knows no chat, with what to check."""
    return NothingRecorded(
        f"task {run.task_id!r}, run {run.run_id!r}: the explorer recorded no chat of it; this process saw "
        f"{len(run.msg_ids)} recorded and {run.unrecorded} unrecorded replies. Does the agent use run.model, or "
        f"flywheel.http_client() with base URL {run.model.base_url}? Is `store` false? Does it hide errors? Does it "
        "begin another run by client.run()? In a workflow of learn, chat with the model that it gets, or run.child()"
    )
