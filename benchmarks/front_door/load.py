"""The loads: requests to a gateway, and the figures measured. One call measures one gateway."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import psutil

from benchmarks.front_door.client import ChatFailed, Client, connected, http_request
from benchmarks.front_door.gateways import Gateway

Figures = dict[str, float]
# A load takes the gateway, and the seconds of plain chats. Streams do not depend on this number.
Load = Callable[[Gateway, float], Coroutine[Any, Any, Figures]]

LIMIT_S = 300.0  # for one load of one gateway
FAILED_PAUSE_S = 0.01  # after a failed chat: a gateway that refuses all would get very many


class LoadFailed(Exception):
    """A gateway answered no chat of a load, did not finish in time, or ended."""

    def __init__(self, gateway: str, why: str) -> None:
        super().__init__(f"{gateway}: {why}")
        self._gateway, self._why = gateway, why

    def as_json(self) -> dict[str, str]:
        return {"gateway": self._gateway, "why": self._why}


async def run_load(measure: Load, gateway: Gateway, seconds: float) -> Figures:
    """Run one load of one gateway, within LIMIT_S. Raises LoadFailed."""
    with failing(gateway):
        async with asyncio.timeout(LIMIT_S):
            return await measure(gateway, seconds)


@contextlib.contextmanager
def failing(gateway: Gateway) -> Iterator[None]:
    """In the block: LoadFailed instead of the errors of a gateway that is too slow, or has ended."""
    try:
        yield
    except TimeoutError:
        raise LoadFailed(gateway.name, f"not finished within {LIMIT_S:g} s") from None
    except (OSError, psutil.NoSuchProcess) as error:
        raise LoadFailed(gateway.name, repr(error)) from error


async def measure_chats(gateway: Gateway, in_flight: int, seconds: float = 0.0, chats: int = 1) -> Figures:
    """Plain chats, `in_flight` at once, for at least so many seconds and at least so many chats.

    A failed one is only counted: a peer may refuse some under load.
    """
    request = http_request(gateway)
    latencies: list[float] = []
    failures: list[ChatFailed] = []

    sent = 0

    async def caller(client: Client) -> None:
        nonlocal sent
        while sent < chats or time.perf_counter() < started + seconds:
            sent += 1
            try:
                latencies.append(await client.send(request))
            except ChatFailed as error:
                failures.append(error)
                await asyncio.sleep(FAILED_PAUSE_S)

    async with connected(gateway, in_flight) as clients:
        for client in clients:  # a connection's first chat is not counted
            with contextlib.suppress(ChatFailed):
                await client.send(request)
        before, started = gateway.cpu_s(), time.perf_counter()
        await asyncio.gather(*map(caller, clients))
        took, used = time.perf_counter() - started, gateway.cpu_s() - before
    _require_some(gateway, latencies, failures)
    latencies.sort()
    return {
        "chats": len(latencies),
        "seconds": took,
        "chats_per_s": len(latencies) / took,
        "cpu_ms_per_chat": 1000 * used / len(latencies),
        "p50_ms": 1000 * latencies[len(latencies) // 2],
        "p99_ms": 1000 * latencies[int(len(latencies) * 0.99)],
        "failed": len(failures),
    }


async def measure_streams(gateway: Gateway, in_flight: int, rounds: int, within_s: float = 0.02) -> Figures:
    """Streams of one event each 20 ms. The first ones begin one after the other within `within_s`."""
    request = http_request(gateway, stream=True)
    firsts: list[float] = []
    gaps: list[float] = []
    counts: list[int] = []
    failures: list[ChatFailed] = []

    async def listener(client: Client, number: int) -> None:
        await asyncio.sleep(within_s * number / in_flight)
        for _ in range(rounds):
            started = time.perf_counter()
            try:
                await client.send(request)
            except ChatFailed as error:
                failures.append(error)
                continue
            firsts.append(client.arrivals[0] - started)
            gaps.extend(b - a for a, b in zip(client.arrivals, client.arrivals[1:], strict=False))
            counts.append(len(client.arrivals))

    async with connected(gateway, in_flight) as clients:
        before = gateway.cpu_s()
        await asyncio.gather(*(listener(client, number) for number, client in enumerate(clients)))
        used = gateway.cpu_s() - before
    _require_some(gateway, counts, failures)
    return {
        "first_event_p50_ms": 1000 * statistics.median(firsts),
        "gap_p50_ms": 1000 * statistics.median(gaps),
        "gap_p99_ms": 1000 * sorted(gaps)[int(len(gaps) * 0.99)],
        "cpu_ms_per_event": 1000 * used / sum(counts),
        "events_min": min(counts),
        "events_max": max(counts),
        "failed": len(failures),
    }


def _require_some(gateway: Gateway, succeeded: list[Any], failures: list[ChatFailed]) -> None:
    if not succeeded:
        raise LoadFailed(gateway.name, f"every chat failed, the first one with {failures[0]!r}")


CHATS: dict[str, Load] = {
    "chats_1": lambda gateway, seconds: measure_chats(gateway, 1, seconds),
    "chats_32": lambda gateway, seconds: measure_chats(gateway, 32, seconds),
}
STREAMS: dict[str, Load] = {
    "streams_1": lambda gateway, _: measure_streams(gateway, 1, 6),
    "streams_16": lambda gateway, _: measure_streams(gateway, 16, 2),
    "streams_64": lambda gateway, _: measure_streams(gateway, 64, 2),
    # the same number, but with starts spread over a stream's length, as in a steady state
    "streams_64_steady": lambda gateway, _: measure_streams(gateway, 64, 2, within_s=1.28),
}


async def warm_up(gateway: Gateway, seconds: float) -> Figures:
    """Run loads like those that are measured afterwards."""
    await measure_chats(gateway, 32, seconds)
    return await measure_streams(gateway, 16, 1)


async def measure_idle(gateways: list[Gateway], seconds: float = 5.0) -> dict[str, Figures]:
    """CPU of idle gateways: of all at once, since none uses much. Raises LoadFailed."""
    before = [_cpu_s(gateway) for gateway in gateways]
    started = time.perf_counter()
    await asyncio.sleep(seconds)
    passed = time.perf_counter() - started
    return {
        gateway.name: {"cpu_ms_per_s": 1000 * (_cpu_s(gateway) - used) / passed}
        for gateway, used in zip(gateways, before, strict=True)
    }


def _cpu_s(gateway: Gateway) -> float:
    with failing(gateway):
        return gateway.cpu_s()


async def soak(gateways: list[Gateway], chats: int, parts: int = 10) -> dict[str, dict[str, Any]]:
    """Resident memory of each gateway after each part of `chats`, 32 in flight; the gateways alternate."""

    async def measure_part(gateway: Gateway, _: float) -> Figures:
        return await measure_chats(gateway, 32, chats=chats // parts)

    figures: dict[str, list[Figures]] = {gateway.name: [] for gateway in gateways}
    for _ in range(parts):
        for gateway in gateways:
            part = await run_load(measure_part, gateway, 0.0)
            with failing(gateway):
                figures[gateway.name].append(part | {"resident_mb": gateway.resident_mb()})
    return {name: {"chats_32": _soaked(parts_of, chats)} for name, parts_of in figures.items()}


def _soaked(parts: list[Figures], chats: int) -> dict[str, Any]:
    resident = [part["resident_mb"] for part in parts]
    return {
        "chats": chats,
        "chats_per_s": statistics.harmonic_mean([part["chats_per_s"] for part in parts]),
        "resident_mb": resident,
        "resident_end_over_first_part": resident[-1] / resident[0],
        "failed": sum(part["failed"] for part in parts),
    }
