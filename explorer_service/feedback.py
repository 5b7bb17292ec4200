"""Stage 3, feedback: rewards and other signals reach rows; every id gets an honest receipt."""

from __future__ import annotations

import hashlib
import math
from typing import Any, Literal

import msgspec
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from explorer_service.auth import Caller
from explorer_service.deps import Deps
from explorer_service.errors import ApiError, bad_request, unavailable
from explorer_service.request import attribution, decode_body, for_parser_of, read_body
from shared.config import RewardConfig
from shared.errors import LedgerError
from shared.ledger import transitions
from shared.ledger.transitions import Receipt
from shared.reward import Signal

MAX_TARGETS = 10_000


class FeedbackBody(msgspec.Struct):
    """What a caller may send; unknown fields are ignored."""

    msg_ids: list[str] | None = None
    task_id: str | int | None = None
    run_id: str | int | None = None
    reward: float | None = None
    rating: Literal["up", "down"] | None = None
    metrics: dict[str, float] | None = None
    comment: str | None = None
    correction: str | None = None
    preferred_over: list[str] | None = None
    scope: Literal["message", "conversation"] | None = None


async def answer_feedback(request: Request, deps: Deps) -> Response:
    """POST /feedback."""
    caller = deps.auth.require(request, "feedback")
    with caller.limit.taken():
        return await _answer_within_limit(request, deps, caller)


async def _answer_within_limit(request: Request, deps: Deps, caller: Caller) -> Response:
    raw = await read_body(request, deps.config.explorer)
    rule = deps.config.reward
    body = parse_feedback(raw, rule)
    msg_ids = list(dict.fromkeys(body.msg_ids or []))
    await deps.in_flight.wait(msg_ids)  # a stream names its id before its row stands
    await deps.fleet.wait_recorded(msg_ids)  # one of another explorer too
    idempotency_key = _idempotency_key(request, caller.name)
    try:
        answer = await deps.recorder.write(
            lambda connection: _apply(connection, body, msg_ids, rule, caller, idempotency_key)
        )
    except LedgerError as exc:
        raise unavailable(f"the feedback could not be stored: {exc}", "not_stored") from exc
    for receipt in answer.receipts:
        deps.metrics.feedback_receipts.labels(receipt.state).inc()
    content = msgspec.json.encode(for_parser_of(request, answer))
    return Response(content, 200 if answer.status == "success" else 404, media_type="application/json")


class Answer(msgspec.Struct):
    """The reply to feedback."""

    status: str
    applied: int
    receipts: list[Receipt]
    error: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


def parse_feedback(raw: bytes, rule: RewardConfig) -> FeedbackBody:
    """Check targets and signals. Raises ApiError 400 naming the field."""
    decode_body(raw)
    try:
        body = msgspec.json.decode(raw, type=FeedbackBody)
    except msgspec.ValidationError as exc:
        raise bad_request(str(exc)) from exc
    if not body.msg_ids and body.task_id is None:
        raise bad_request("name the targets: msg_ids, or task_id with or without run_id", param="msg_ids")
    if len(body.msg_ids or []) > MAX_TARGETS:
        raise bad_request(f"at most {MAX_TARGETS} msg_ids in one request", param="msg_ids")
    for name in body.msg_ids or []:
        if "\x00" in name:
            raise bad_request("a message id has no NUL in it", param="msg_ids")
    if not _signals(body):
        raise bad_request("say at least one of reward, rating, metrics, comment, correction, preferred_over")
    for signal in _signals(body):
        if signal.value is not None and not math.isfinite(signal.value):
            raise bad_request(f"{signal.name or signal.kind} must be a finite number", param=signal.kind)
        if "\x00" in (signal.text or "") + (signal.name or ""):
            raise bad_request("text must not hold NUL", param=signal.kind)
    accept = rule.accept
    if accept is not None and body.reward is not None and not accept[0] <= body.reward <= accept[1]:
        raise bad_request(f"reward must lie between {accept[0]:g} and {accept[1]:g}", param="reward")
    return body


def _signals(body: FeedbackBody) -> list[Signal]:
    said: list[Signal] = []
    if body.reward is not None:
        said.append(Signal("reward", value=body.reward))
    if body.rating is not None:
        said.append(Signal("rating", text=body.rating))
    said += [Signal("metric", value=value, name=name) for name, value in (body.metrics or {}).items()]
    if body.comment is not None:
        said.append(Signal("comment", text=body.comment))
    if body.correction is not None:
        said.append(Signal("correction", text=body.correction))
    said += [Signal("preferred_over", text=other) for other in body.preferred_over or []]
    return said


def _idempotency_key(request: Request, key_name: str | None) -> str | None:
    """The caller's key, apart from other callers' keys of the same name."""
    given = request.headers.get("idempotency-key")
    if given is None:
        return None
    return hashlib.sha256(f"{key_name}\x00{given}".encode("utf-8", "surrogateescape")).hexdigest()


def _apply(
    connection: Connection,
    body: FeedbackBody,
    msg_ids: list[str],
    rule: RewardConfig,
    caller: Caller,
    idempotency_key: str | None,
) -> Answer:
    """In one transaction: the answer given before, or the change and its answer."""
    if idempotency_key is not None:
        before = transitions.remembered_answer(connection, idempotency_key)
        if before is not None:
            return msgspec.json.decode(before, type=Answer)
    receipts = transitions.apply_feedback(
        connection,
        msg_ids=msg_ids,
        task_id=attribution(body.task_id, "task_id"),
        run_id=attribution(body.run_id, "run_id"),
        said=_signals(body),
        rule=rule,
        key_name=caller.name,
        key_group=caller.group,
        conversations=body.scope == "conversation",
    )
    answer = _answer(receipts)
    if idempotency_key is not None:
        transitions.remember_answer(connection, idempotency_key, msgspec.json.encode(answer))
    return answer


def _answer(receipts: list[Receipt]) -> Answer:
    if all(receipt.state == "unknown" for receipt in receipts):
        error = ApiError(404, "no target of this feedback is known here", code="unknown_target")
        return Answer("error", 0, receipts, msgspec.json.decode(error.body())["error"])
    return Answer("success", sum(receipt.state in ("applied", "updated") for receipt in receipts), receipts)
