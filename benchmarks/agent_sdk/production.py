"""The cost of a watched production call above a bare one, and of a chat with the package above one without."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import flywheel

from benchmarks.agent_sdk import HI


async def agent(request: dict[str, Any], model: flywheel.Model | None) -> str:
    """Production answers at once; the trainee asks its model."""
    if model is None:
        return "production"
    async with model.async_openai(max_retries=0) as openai:
        reply = await openai.chat.completions.create(model=model.name, messages=HI)
    return reply.choices[0].message.content or ""


def watched(select: Any, url: str) -> tuple[flywheel.TrainingRunner, Callable[[Any], Awaitable[str]]]:
    """A runner that is not started, and its production function."""
    runner = flywheel.TrainingRunner(url, agent, lambda run, reply: 1.0, select=select, timeout_s=5)
    return runner, runner.watch(agent)


def added_us(url: str, calls: int) -> float:
    """Microseconds that a watched call adds to a bare one if nothing is selected."""
    runner, served = watched(flywheel.SamplingRate(0.0), url)
    request = {"text": "hello"}

    async def measure(function: Callable[..., Awaitable[str]], *more: Any) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            await function(request, *more)
        return (time.perf_counter() - began) / calls * 1e6

    async def rounds() -> float:
        return statistics.median([await measure(served) - await measure(agent, None) for _ in range(5)])

    with runner:
        return asyncio.run(rounds())


def latencies_ms(url: str, seconds: float, share: float) -> dict[str, float]:
    """Latencies of production calls at 100 a second, a share of which is replayed; a bare call follows each.

    late: how much later than scheduled a call began, for both.
    """
    runner, served = watched(flywheel.SamplingRate(share, seed=1), url)
    found: list[float] = []
    bare: list[float] = []
    late: list[float] = []
    failed = 0

    async def traffic() -> None:
        nonlocal failed
        begin = time.perf_counter()
        for number in range(int(100 * seconds)):
            await asyncio.sleep(max(0.0, begin + number / 100 - time.perf_counter()))
            request, began = {"text": "hello", "history": HI * 10}, time.perf_counter()
            late.append(max(0.0, began - begin - number / 100) * 1e3)
            try:
                await served(request)
            except Exception:  # noqa: BLE001 — an error of production: counted
                failed += 1
            ended = time.perf_counter()
            await agent(request, None)
            found.append((ended - began) * 1e3)
            bare.append((time.perf_counter() - ended) * 1e3)

    runner.start()
    asyncio.run(traffic())
    runner.stop(0.0)
    ours, theirs, lateness = (statistics.quantiles(times, n=100) for times in (found, bare, late))
    stats = runner.stats
    counts = {"failed": failed, "selected": stats.selected, "rewarded": stats.rewarded}
    added = {"added_p50_ms": ours[49] - theirs[49], "added_p99_ms": ours[98] - theirs[98]}
    return {**added, "p99_ms": ours[98], "p99_late_ms": lateness[98], **counts}


async def _chats(client: Any, number: int) -> float:
    """CPU seconds of this thread for this many chats, one after the other."""
    began = time.thread_time()
    for _ in range(number):
        await client.chat.completions.create(model="agent", messages=HI)
    return time.thread_time() - began


async def chat_cpu(url: str, chats: int) -> dict[str, float]:
    """CPU of a chat through run.model.async_openai() and through a bare AsyncOpenAI, alternating."""
    import openai

    ours, theirs = [], []
    async with (
        flywheel.AsyncClient(url) as client,
        client.run() as run,
        run.model.async_openai(max_retries=0) as model,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as bare,
    ):
        await _chats(model, 20)
        await _chats(bare, 20)
        for _ in range(5):
            ours.append(await _chats(model, chats))
            theirs.append(await _chats(bare, chats))
    ratio = statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
    mean = {"ours_us": statistics.median(ours), "bare_us": statistics.median(theirs)}
    return {**{name: value / chats * 1e6 for name, value in mean.items()}, "ratio": ratio}
