"""One request's way to an engine: a seat, the request, the head of the answer; and another engine if that one is lost.

As long as nothing has gone to the caller an engine's death costs only time: the request goes to another engine.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar

from explorer_service.deps import Deps
from explorer_service.engines.connection import ConnectionLost, Reply
from explorer_service.engines.pool import Engine, EngineState, Seat
from explorer_service.errors import RETRY_AFTER_S, ApiError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ask:
    """What an engine is asked."""

    path: str
    data: bytes
    request_id: str  # vLLM makes the reply's id from it
    pin: int | None = None
    seeded: bool = False
    affinity: int = 0
    method: str = "POST"


class EngineLost(ApiError):
    """The engine broke off. It gets no more chats until it has proven itself again."""

    def __init__(self, engine: Engine, reason: str) -> None:
        message = f"engine {engine.name} broke off ({reason}); try again"
        super().__init__(503, message, kind="service_unavailable", code="engine_lost", retry_after_s=RETRY_AFTER_S)
        self.engine = engine


async def on_some_engine(attempt: Callable[[list[Engine]], Awaitable[T]], deps: Deps) -> T:
    """Run `attempt(engines to avoid)`; when its engine is lost, again on another one. Raises ApiError."""
    lost: list[Engine] = []
    while True:
        try:
            return await attempt(lost)
        except EngineLost as error:
            lost.append(error.engine)
            if not deps.pool.has_other(lost):
                raise


async def engage_within(stack: AsyncExitStack, ask: Ask, deps: Deps) -> tuple[Seat, Reply]:
    """A seat at some engine and its answer, both held until the stack ends. Raises ApiError."""

    async def attempt(avoid: list[Engine]) -> tuple[Seat, Reply]:
        return await stack.enter_async_context(Engagement(ask, deps, avoid))

    return await on_some_engine(attempt, deps)


class Engagement:
    """`async with Engagement(...) as (seat, reply):` — a seat, and the engine's answer with its head read.

    Raises ApiError 503, EngineLost among them.
    """

    __slots__ = ("_ask", "_avoid", "_deps", "_reply", "_seat", "_started")

    def __init__(self, ask: Ask, deps: Deps, avoid: list[Engine]) -> None:
        self._ask = ask
        self._deps = deps
        self._avoid = avoid

    async def __aenter__(self) -> tuple[Seat, Reply]:
        ask, deps = self._ask, self._deps
        self._seat = await deps.pool.take(ask.pin, seeded=ask.seeded, affinity=ask.affinity, avoid=self._avoid)
        self._started = time.perf_counter()
        deps.metrics.chat_in_flight.inc()
        try:
            self._reply = await _send(ask, self._seat, deps)
        except BaseException:
            self._leave()
            raise
        return self._seat, self._reply

    async def __aexit__(self, *_: object) -> None:
        if self._reply.is_whole and self._reply.status == 200:
            self._seat.engine.answered_at = time.monotonic()
        self._reply.close()  # when it is not whole, the engine aborts what it was sampling
        self._leave()

    def _leave(self) -> None:
        self._deps.pool.give_back(self._seat)
        self._seat.engine_s = time.perf_counter() - self._started
        self._deps.metrics.chat_in_flight.dec()
        self._deps.metrics.chat_engine.observe(self._seat.engine_s)


async def _send(ask: Ask, seat: Seat, deps: Deps) -> Reply:
    headers = {"X-Request-Id": ask.request_id, "Content-Type": "application/json"}
    try:
        return await deps.connections.request(ask.method, seat.engine.url, ask.path, ask.data, headers)
    except (ConnectionLost, TimeoutError) as exc:
        raise engine_lost(seat, deps, exc) from exc


async def read_whole(reply: Reply, seat: Seat, deps: Deps) -> bytes:
    """The answer's body. Raises EngineLost."""
    try:
        return await reply.read()
    except (ConnectionLost, TimeoutError) as exc:
        raise engine_lost(seat, deps, exc) from exc


def engine_lost(seat: Seat, deps: Deps, exc: Exception) -> EngineLost:
    """What to raise; the engine is marked away, unless it was only slow."""
    reason = str(exc) or type(exc).__name__
    if not isinstance(exc, TimeoutError) and seat.engine.state is EngineState.SERVING:
        deps.pool.set_state(seat.engine, EngineState.AWAY, reason)
    return EngineLost(seat.engine, reason)
