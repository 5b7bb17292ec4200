"""The cost of `learn` above a bare loop with the same calls, its memory, and its pace."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import flywheel

from benchmarks.agent_sdk import HI
from benchmarks.agent_sdk.servers import server

COLLECT: dict[str, Any] = {"require_trainer": False, "progress": False, "max_ready_rows": 10**9}
_names = itertools.count()


async def four_turns(task: dict[str, Any], model: flywheel.Model) -> float:
    """A scripted run."""
    async with model.async_openai(max_retries=0) as openai:
        for _ in range(4):
            await openai.chat.completions.create(model=model.name, messages=HI)
    return float(task["n"] % 2)


def learn(url: str, runs: int, folder: Path, **options: Any) -> flywheel.Report:
    """Run `learn` over this many runs of four turns, 32 at once."""
    given = {**COLLECT, "url": url, "folder": folder / f"learn-{next(_names)}", **options}
    return flywheel.learn(four_turns, [{"n": n} for n in range(runs)], **given)


async def bare_loop(url: str, runs: int) -> None:
    """A plain loop with the same calls: chats, one feedback and one commit for each run."""
    import httpx
    import openai

    gate = asyncio.Semaphore(32)
    bare = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    http = httpx.AsyncClient(base_url=url)
    first = next(_names)

    async def one(number: int) -> None:
        name = f"bare-{first}-{number}"
        async with gate:
            for _ in range(4):
                names = {"X-Flywheel-Task": name, "X-Flywheel-Run": "0"}
                await bare.chat.completions.create(model="agent", messages=HI, extra_headers=names)
            (await http.post("/feedback", json={"task_id": name, "reward": number % 2})).raise_for_status()
            (await http.post("/commit", json={"task_id": name})).raise_for_status()

    await asyncio.gather(*(one(number) for number in range(runs)))
    await bare.close()
    await http.aclose()


def beside_bare(url: str, runs: int, folder: Path) -> dict[str, float]:
    """Wall and CPU seconds of `learn` and of the bare loop: the better of two alternating runs."""
    ours, bare = [], []
    for _ in range(2):
        bare.append(_clocked(lambda: asyncio.run(bare_loop(url, runs))))
        ours.append(_clocked(lambda: learn(url, runs, folder)))
    (ours_s, ours_cpu_s), (bare_s, bare_cpu_s) = min(ours), min(bare)
    return {
        "ours_s": ours_s,
        "bare_s": bare_s,
        "ratio": ours_s / bare_s,
        "ours_cpu_s": ours_cpu_s,
        "bare_cpu_s": bare_cpu_s,
    }


def _clocked(call: Any) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def memory(url: str, runs: int, folder: Path) -> dict[str, Any]:
    """Resident memory of this process during this many runs: after the first twentieth, and the peak."""
    seen: list[float] = []
    begun = itertools.count()

    async def one_turn(task: dict[str, Any], model: flywheel.Model) -> float:
        async with model.async_openai(max_retries=0) as openai:
            await openai.chat.completions.create(model=model.name, messages=HI)
        if next(begun) % (runs // 20) == 0:
            seen.append(_resident_mb())
        return 1.0

    tasks = [{"n": n} for n in range(runs)]
    flywheel.learn(one_turn, tasks, url=url, folder=folder / "memory", **COLLECT)
    return {"runs": runs, "begin_mb": seen[1], "end_mb": seen[-1], "grown_mb": max(seen) - seen[1]}


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def overload(runs: int, folder: Path) -> dict[str, Any]:
    """What happens to rows if workers are faster than the trainer: with the pace of `learn`, and without."""
    paced: dict[str, Any] = {"max_ready_rows": None}
    cases: dict[str, dict[str, Any]] = {
        "paced": paced,
        "paced_groups_of_8": {**paced, "runs_per_task": 8},
        "unpaced": {},
    }
    found: dict[str, Any] = {}
    for name, options in cases.items():
        found[name] = {}
        with server("trained", found[name]) as url:
            began = time.perf_counter()
            report = learn(url, runs // options.get("runs_per_task", 1), folder, require_trainer=True, **options)
            found[name] |= {"rows_a_second": 4 * report.runs / (time.perf_counter() - began)}
    workers_to_trainer = found["unpaced"]["rows_a_second"] / found["paced"]["rows_a_second"]
    return {**found, "workers_to_trainer": workers_to_trainer}
