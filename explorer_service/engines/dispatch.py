"""Dispatch a request: get an engine slot, send the request, receive the answer; if the engine fails, try another one.

Until a byte was sent to the caller, an engine's death costs only time. The request is encoded after its engine was
chosen, because the version determines the model's name there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from explorer_service.engines.connection import EngineResponse
from explorer_service.engines.faults import is_shortage, message_of
from explorer_service.engines.hold import Hold
from explorer_service.engines.http import EngineHttp
from explorer_service.engines.pool import EnginePool
from explorer_service.engines.slot import EngineSlot
from explorer_service.errors import (
    AdapterForgotten,
    EngineLost,
    EngineUnavailable,
    NoEngine,
    VersionNotServed,
    WeightsUnproven,
)
from explorer_service.metrics import ExplorerMetrics

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request for any engine."""

    path: str
    body: dict[str, Any]  # without the model's name
    request_id: str  # vLLM derives the reply's id from it
    _: KW_ONLY
    version: int | None = None  # the version that must answer; None: any
    preferred: int | None = None  # the version that answers if an engine serves it, and `version` is None
    seeded: bool = False
    affinity: int = 0  # requests with the same number prefer the same engine
    unknown_model: object = None  # sent instead of the version's name; the engine refuses it
    is_chat: bool = False  # counted in the metrics of chats

    def encode(self, model: str) -> bytes:
        sent = model if self.unknown_model is None else self.unknown_model
        return msgspec.json.encode({**self.body, "model": sent})


@dataclass(frozen=True, slots=True)
class EngineReply:
    """A complete answer."""

    slot: EngineSlot
    status: int
    content_type: str
    content: bytes
    engine_s: float  # time that the engine needed


class Exchange:
    """A request at an engine, and its answer after the head: `async with exchange:` frees slot and connection."""

    __slots__ = ("_dispatcher", "_response", "_started", "slot")

    def __init__(self, slot: EngineSlot, response: EngineResponse, started: float, dispatcher: Dispatcher) -> None:
        self.slot = slot
        self._response = response
        self._started = started
        self._dispatcher = dispatcher

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def content_type(self) -> str:
        return self._response.content_type

    async def proven(self) -> Exchange:
        """Return this exchange once its engine is open and has proven its weights.

        Raises WeightsUnproven, NoEngine; this exchange is closed then.
        """
        try:
            if self.slot.early_hold is not None:
                await self._dispatcher.pool.wait_open(self.slot.early_hold)
            if self.slot.hold.is_on:
                await self._wait(self.slot.hold)
        except BaseException:
            self.close(reusable=False)
            raise
        return self

    async def read(self) -> EngineReply:
        """Read the whole answer. Raises EngineLost, WeightsUnproven."""
        try:
            content = await self._response.read()
        except (EngineUnavailable, TimeoutError) as exc:
            raise self._dispatcher.lost(self.slot, exc) from exc
        self.slot.last_at = self._response.received_at
        if self.slot.last_at >= self._dispatcher.pool.awake_until:
            await self._dispatcher.pool.wait_awake()
        if self.slot.hold.is_on:
            await self._wait(self.slot.hold)
        return EngineReply(self.slot, self.status, self.content_type, content, time.perf_counter() - self._started)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the answer's parts as they arrive. Raises EngineLost, WeightsUnproven."""
        pool, slot, response = self._dispatcher.pool, self.slot, self._response
        engine, hold = slot.engine, slot.hold
        try:
            while chunk := await response.read_some():
                pool.note_answer(engine)
                slot.first_at, slot.last_at = response.first_at, response.received_at
                if slot.last_at >= pool.awake_until:
                    await pool.wait_awake()
                if hold.is_on:
                    await self._wait(self.slot.hold)
                yield chunk
        except (EngineUnavailable, TimeoutError) as exc:
            raise self._dispatcher.lost(self.slot, exc) from exc

    async def _wait(self, hold: Hold) -> None:
        """Wait while the engine's replies are held back, at most as long as a request may take.

        Raises WeightsUnproven.
        """
        limit_s = self._dispatcher.http.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await hold.wait()
        except TimeoutError as exc:
            engine = self.slot.engine.name
            raise WeightsUnproven(f"engine {engine} has not proven its weights within {limit_s:g} s") from exc

    async def __aenter__(self) -> Exchange:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None and self.status == 200 and self._response.is_complete:
            self._dispatcher.pool.note_answer(self.slot.engine)
        self.close(reusable=error is None)

    def close(self, *, reusable: bool) -> None:
        """Free slot and connection. If the answer is incomplete, the engine aborts the request."""
        self._response.close(reusable=reusable)
        self._dispatcher.end(self.slot, self._started)


class Dispatcher:
    """Sends each request to an engine, and to another one if that fails."""

    def __init__(
        self,
        pool: EnginePool,
        http: EngineHttp,
        metrics: ExplorerMetrics,
        health_checks: Mapping[str, Callable[[], Awaitable[None]]],
        pin: Callable[[int], AbstractAsyncContextManager[None]] | None = None,
    ) -> None:
        """health_checks: by engine name; each raises EngineUnavailable if the engine is not healthy.

        pin: if engines load adapters, has the version that a request names loaded while the request waits.
        """
        self.pool = pool
        self._health_checks = health_checks
        self._pin = pin
        self.http = http
        self._metrics = metrics

    async def fetch(self, request: EngineRequest, read: Callable[[EngineReply], T]) -> tuple[EngineReply, T]:
        """Return the whole answer of an engine, and the result of `read` for it.

        If `read` raises, the connection is closed, because its data can no longer be trusted. Raises NoEngine,
        VersionNotServed, EngineLost.
        """
        lost: list[str] = []
        while True:
            try:
                async with await self._send(request, lost) as exchange:
                    reply = await exchange.read()
                    return reply, read(reply)
            except (WeightsUnproven, AdapterForgotten):
                continue  # nothing was sent to the caller: proven weights answer the request again
            except EngineLost as error:
                self._note_lost(error, lost)

    async def open(self, request: EngineRequest) -> Exchange:
        """Return an engine's answer once its head has arrived, to be read in parts. Raises like `fetch`."""
        lost: list[str] = []
        while True:
            try:
                return await self._send(request, lost)
            except (WeightsUnproven, AdapterForgotten):
                continue
            except EngineLost as error:
                self._note_lost(error, lost)

    def _note_lost(self, error: EngineLost, lost: list[str]) -> None:
        """Note the engine that lost the request. Raises the error if no other engine may try it."""
        lost.append(error.engine)
        is_timeout = isinstance(error.__cause__, TimeoutError)  # another engine would have as long again
        if is_timeout or not self.pool.has_other(lost):
            raise error

    async def _send(self, request: EngineRequest, avoid: list[str]) -> Exchange:
        pin = nullcontext() if self._pin is None or request.version is None else self._pin(request.version)
        async with pin:
            slot = await self._acquire(request, avoid)
        started, slot.is_chat = time.perf_counter(), request.is_chat
        if slot.is_chat:
            self._metrics.chat_in_flight.inc()
        headers = {"X-Request-Id": request.request_id, "Content-Type": "application/json"}
        try:
            data = request.encode(slot.model)
            response = await self.http.post(slot.engine.url, request.path, data, headers)
            if response.status >= 400:
                await self._check_error(slot, request, response)
        except BaseException as exc:
            self.end(slot, started)
            if isinstance(exc, EngineUnavailable) and slot.early_hold is not None and not slot.engine.is_open:
                raise WeightsUnproven(str(exc)) from exc  # it waits again, like the chats that were not sent early
            if isinstance(exc, EngineUnavailable | TimeoutError):
                raise self.lost(slot, exc) from exc
            raise
        if request.unknown_model is not None and response.status == 200:  # the engine's own name for an adapter
            response.close(reusable=False)
            self.end(slot, started)
            raise VersionNotServed(f"The model `{request.unknown_model}` does not exist.")
        return await Exchange(slot, response, started, self).proven()

    async def _acquire(self, request: EngineRequest, avoid: list[str]) -> EngineSlot:
        acquire = partial(self.pool.acquire, seeded=request.seeded, affinity=request.affinity, avoid=avoid)
        wait_s = self.pool.wait_s
        if request.preferred is not None and self.pool.serves(request.preferred, avoid):
            wait_s /= 2  # for each of the two
            with suppress(VersionNotServed, NoEngine):  # it went out of service, or no engine with it became free
                return await acquire(request.preferred, wait_s)
        return await acquire(request.version, wait_s)

    async def _check_error(self, slot: EngineSlot, request: EngineRequest, response: EngineResponse) -> None:
        """Raise if the engine caused the error response, not the request."""
        try:
            if response.status >= 500:
                await self._require_healthy(slot, response)
            elif response.status == 404 and self._pin is not None and request.unknown_model is None:
                await self._require_known(slot, response)
        except BaseException:
            response.close(reusable=False)
            raise

    async def _require_healthy(self, slot: EngineSlot, response: EngineResponse) -> None:
        """Raise EngineUnavailable if the engine is not healthy: vLLM answers chats with 500 if its core has died."""
        try:
            await self._health_checks[slot.engine.name]()
        except EngineUnavailable as exc:
            raise EngineUnavailable(f"it answered with status {response.status} and is not healthy: {exc}") from exc

    async def _require_known(self, slot: EngineSlot, response: EngineResponse) -> None:
        """Raise AdapterForgotten if the engine no longer knows the model's name under which it served the version."""
        unknown = f"The model `{slot.model}` does not exist."
        if slot.version and message_of(await response.peek()).startswith(unknown):
            reason = f"it lacks adapter {slot.model}, which it had loaded"
            if slot.engine.is_open:
                self.pool.check(slot.engine, reason)
            raise AdapterForgotten(f"engine {slot.engine.name}: {reason}")

    def end(self, slot: EngineSlot, started: float) -> None:
        """Free the slot of a request that the engine has finished. started: time.perf_counter()."""
        self.pool.release(slot)
        if slot.is_chat:
            self._metrics.chat_in_flight.dec()
            self._metrics.chat_engine.observe(time.perf_counter() - started)

    def lost(self, slot: EngineSlot, error: Exception) -> EngineLost:
        """Return the error to raise. Withdraws the engine unless it was only slow, or this machine had a shortage."""
        reason = str(error) or "it took too long"
        is_fault = not isinstance(error, TimeoutError) and not is_shortage(error.__cause__)
        if is_fault and slot.engine.is_open:
            self.pool.withdraw(slot.engine, reason)
        return EngineLost(slot.engine.name, reason)
