"""Stage 3, feedback: add rewards and other signals to rows; every id gets a receipt.

A request about many rows is applied in slices, each in its own short transaction, so that chats do not wait for it. If
a slice fails, the earlier ones stay applied; if the caller repeats the request, the receipts of those rows are
`duplicate`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError
from starlette.requests import Request
from starlette.responses import Response

from explorer_service.api.answer import json_answer
from explorer_service.api.auth import Caller
from explorer_service.api.body import decode_typed, ignored_fields, while_caller_waits
from explorer_service.api.compat import agentscope_java_answer
from explorer_service.api.errors import ApiError, bad_request, unavailable
from explorer_service.chat.request import read_id
from explorer_service.deps import Deps
from explorer_service.feedback_limits import (
    AT_ONCE_COST,
    FIND_TIMEOUT_S,
    MAX_ROWS,
    SLICE_COST,
    check_choice,
    check_rewards,
    check_signals,
    check_targets,
    cost_of_row,
    require_room,
)
from explorer_service.idempotency import KeyedRequest, recall, remember, take
from explorer_service.ledger_writer import WriteInParts
from shared.config import RewardConfig
from shared.errors import LedgerError
from shared.ledger import queries, transitions
from shared.ledger.queries import Targets
from shared.ledger.transitions import GivenFeedback, Receipt
from shared.reward import Scope, Signal


class FeedbackBody(msgspec.Struct):
    """The body of POST /feedback. Unknown fields are ignored, and listed in the answer."""

    msg_ids: list[str] | None = None
    task_id: str | int | None = None
    run_id: str | int | None = None
    reward: float | None = None
    rating: str | None = None
    metrics: dict[str, float] | None = None
    comment: str | None = None
    correction: str | None = None
    preferred_over: list[str] | None = None
    scope: str | None = None
    each: bool | None = None  # the signals are for each message, not for the whole


_decode_feedback = msgspec.json.Decoder(FeedbackBody).decode


async def answer_feedback(request: Request, deps: Deps) -> Response:
    """POST /feedback."""
    caller = deps.auth.require(request, "feedback", open_to_networks=True)
    with caller.limit.taken():
        raw = await deps.bodies.read(request)
        body, signals = parse_feedback(raw, deps.config.reward)
        ignored = ignored_fields(raw, body)
        msg_ids = list(dict.fromkeys(body.msg_ids or []))
        feedback = _Feedback(body, msg_ids, signals, caller, deps, _keyed_request(request, caller.name, raw))
        async with while_caller_waits(request.receive):  # if the caller leaves now, nothing is applied
            await feedback.wait_recorded()
        receipts = await feedback.apply()
    for state, count in Counter(receipt.state for receipt in receipts).items():
        deps.metrics.feedback_receipts.labels(state).inc(count)
    is_unknown = all(receipt.state == "unknown" for receipt in receipts)
    applied = sum(receipt.state in ("applied", "updated") for receipt in receipts)
    answer: dict[str, Any] = {"status": "error" if is_unknown else "success", "applied": applied, "receipts": receipts}
    if ignored:
        answer["ignored"] = ignored
    if is_unknown:
        answer["error"] = ApiError(404, "all targets of this feedback are unknown", code="unknown_target").content()
        return json_answer(answer, 404)
    return json_answer(agentscope_java_answer(request, answer))


def parse_feedback(raw: bytes, rule: RewardConfig) -> tuple[FeedbackBody, list[Signal]]:
    """Parse the targets and signals. Raises ApiError 400 with the field's name."""
    body = decode_typed(raw, _decode_feedback)
    check_choice("rating", body.rating, ("up", "down"))
    check_choice("scope", body.scope, ("message", "conversation"))
    signals = _signals(body)
    if not body.msg_ids and read_id(body.task_id, "task_id") is None:
        raise bad_request("name the targets: msg_ids, or task_id with or without run_id", "msg_ids")
    if not signals:
        raise bad_request("give at least one of reward, rating, metrics, comment, correction, preferred_over")
    check_targets(body.msg_ids or [])
    check_signals(signals)
    check_rewards(body.reward, body.metrics or {}, rule)
    return body, signals


def _signals(body: FeedbackBody) -> list[Signal]:
    signals: list[Signal] = []
    if body.reward is not None:
        signals.append(Signal("reward", value=body.reward))
    if body.rating is not None:
        signals.append(Signal("rating", text=body.rating))
    signals += [Signal("metric", value=value, name=name) for name, value in (body.metrics or {}).items()]
    if body.comment is not None:
        signals.append(Signal("comment", text=body.comment))
    if body.correction is not None:
        signals.append(Signal("correction", text=body.correction))
    signals += [Signal("preferred_over", text=other) for other in body.preferred_over or []]
    return signals


def _keyed_request(request: Request, key_name: str | None, raw: bytes) -> KeyedRequest | None:
    """Return the digests of the caller and its idempotency key, and of the body; None: no such key was sent."""
    given = request.headers.get("idempotency-key")
    if not given:
        return None
    caller = f"key {key_name}" if key_name is not None else f"address {request.client.host if request.client else ''}"
    key = hashlib.sha256(f"{caller}\x00{given}".encode("utf-8", "surrogateescape")).hexdigest()
    return KeyedRequest(key, hashlib.sha256(raw).digest())


class _Feedback:
    """Applies one request to the ledger."""

    def __init__(
        self,
        body: FeedbackBody,
        msg_ids: list[str],
        signals: list[Signal],
        caller: Caller,
        deps: Deps,
        keyed: KeyedRequest | None,
    ) -> None:
        self._msg_ids = msg_ids
        self._given = GivenFeedback(
            signals,
            deps.config.reward,
            deps.config.trainer.learns_from,
            caller.name,
            read_id(body.task_id, "task_id"),
            read_id(body.run_id, "run_id"),
            named=frozenset(msg_ids),
            conversations=body.scope == "conversation",
        )
        self._group = caller.group
        self._scope: Scope | None = "message" if body.each else None
        self._cost = cost_of_row(signals)
        self._deps = deps
        self._keyed = keyed

    async def wait_recorded(self) -> None:
        """Wait until the rows of target streams are stored: callers know a stream's id, run and task earlier.

        Raises ApiError 503 if one of them streams for too long, LedgerError.
        """
        limit_s = self._deps.config.explorer.request_timeout_s
        streams, names = self._deps.open_streams, self._msg_ids
        try:
            async with asyncio.timeout(limit_s):
                if not names and self._given.task_id is not None:
                    names = await streams.of_task(self._given.task_id, self._given.run_id, self._group)
                await streams.wait_recorded(names)
        except TimeoutError as exc:
            reason = f"a message is still being streamed after {limit_s:g} s; try again when its stream has ended"
            raise unavailable(reason, "stream_open") from exc

    async def apply(self) -> list[Receipt]:
        """Apply the request, or recall its answer. Raises ApiError, TooManySignals, TooManyTargets, LedgerError."""
        try:
            return await self._apply()
        except LedgerError as error:
            if not isinstance(error.__cause__, IntegrityError):
                raise
            known, _ = await self._deps.reader.read(self._read)
            if known is None:
                raise
            return known  # the same request was sent twice at once, and the other copy was applied first

    async def _apply(self) -> list[Receipt]:
        if self._msg_ids and not self._given.conversations and len(self._msg_ids) * self._cost <= AT_ONCE_COST:
            done = await self._deps.feedback_writer.write(self._apply_at_once)
            if done is not None:
                return done
        known, targets = await self._deps.reader.read(self._read, FIND_TIMEOUT_S)
        if known is not None:
            return known
        require_room(self._given.signals, sum(map(len, targets.values())))
        receipts: list[Receipt] = []
        *first, last = _slices(targets, self._cost)
        if first and (keyed := self._keyed) is not None:
            known = await self._deps.feedback_writer.write(lambda c: take(c, keyed, self._msg_ids))
            if known is not None:
                return known
        parts = WriteInParts(self._deps.feedback_writer)
        for part in first:
            receipts += await parts.write(partial(self._apply_part, part))
        return await parts.write(lambda c: self._apply_last(c, last, receipts))

    def _read(self, connection: Connection) -> tuple[list[Receipt] | None, Targets]:
        known = recall(connection, self._keyed, self._msg_ids)
        return known, {} if known is not None else self._find(connection)

    def _find(self, connection: Connection) -> Targets:
        return queries.find_targets(
            connection,
            msg_ids=self._msg_ids,
            task_id=self._given.task_id,
            run_id=self._given.run_id,
            key_group=self._group,
            conversations=self._given.conversations,
            scope=self._scope,
            at_most=MAX_ROWS,
        )

    def _apply_at_once(self, connection: Connection) -> list[Receipt] | None:
        """Returns None, with nothing changed, if the messages have so many choices that slices are needed."""
        known = recall(connection, self._keyed, self._msg_ids)
        if known is not None:
            return known
        targets = self._find(connection)
        is_too_much = len(targets) > 1 and sum(map(len, targets.values())) * self._cost > AT_ONCE_COST
        return None if is_too_much else self._apply_last(connection, targets, [])

    def _apply_part(self, targets: Targets, connection: Connection) -> list[Receipt]:
        return transitions.apply_to(connection, targets, self._given)

    def _apply_last(self, connection: Connection, targets: Targets, before: list[Receipt]) -> list[Receipt]:
        receipts = before + self._apply_part(targets, connection)
        remember(connection, self._keyed, self._msg_ids, receipts)
        return receipts


def _slices(targets: Targets, cost_of_row: float) -> Iterator[Targets]:
    """Yield the targets in slices that cost at most SLICE_COST or have one target; without targets, an empty slice."""
    part: Targets = {}
    cost = 0.0
    for name, ids in targets.items():
        more = max(1, len(ids)) * cost_of_row
        if part and cost + more > SLICE_COST:
            yield part
            part, cost = {}, 0.0
        part[name] = ids
        cost += more
    yield part
