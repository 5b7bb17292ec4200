"""`python -m benchmarks.crowds`: see __init__.py."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import benchmarks.crowds
from benchmarks.crowds.crowds import CROWDS, TARGETS, Crowd, nobody
from benchmarks.front_door.client import ChatFailed, Client, connected, http_request, wait_ready
from benchmarks.front_door.figures import rounded
from benchmarks.front_door.gateways import OTHER_CORE, REPOSITORY, Gateway, start_gateways, start_upstream
from benchmarks.front_door.load import measure_chats
from benchmarks.front_door.running import end_on_sigterm, run

HONEST = 32
LEAST = 2  # of a crowd, also of requests that it sends one after the other
STEADY_EVERY_S = 0.08  # between the times when two chats of a caller are due
AT_MOST = 2.0  # relative to the p99 of the same callers alone
LONGER_AT_MOST_MS = {"feedback": 100.0}  # than the slowest chat of the same callers alone, by crowd
PROMPT, REPLY = 100, 64  # tokens


def main() -> None:
    args = _arguments()
    end_on_sigterm()
    os.sched_setaffinity(0, {OTHER_CORE})
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found: dict[tuple[str, str], dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory(prefix="flywheel-crowds-", dir=REPOSITORY) as name, ExitStack() as stack:
        folder = Path(name)
        upstream = start_upstream(PROMPT, REPLY, folder, stack, "benchmarks.crowds.engine")
        _, gateway = start_gateways(("flywheel",), None, None, upstream, folder, stack)
        run(wait_ready(gateway))
        run(measure_chats(gateway, HONEST, chats=TARGETS + 2 * HONEST))  # warm, and rows to rate
        for turn in range(args.turns):
            print(f"turn {turn + 1} of {args.turns}", file=sys.stderr)
            for load, every_s in (("busy", 0.0), ("steady", STEADY_EVERY_S)):
                for crowd in args.only:
                    of_crowd = found.setdefault((crowd, load), {"alone": [], "beside": []})
                    seconds = args.seconds
                    for who, beside in (("beside", CROWDS[crowd]), ("alone", nobody)):
                        figures = run(measure(gateway, folder, beside, seconds, every_s))
                        of_crowd[who].append(figures)
                        seconds = figures["seconds"]  # alone for as long: the slowest of more chats is slower
    report = {f"{crowd}, {load}": summary(of, LONGER_AT_MOST_MS.get(crowd)) for (crowd, load), of in found.items()}
    print(json.dumps(rounded(report)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=benchmarks.crowds.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one measurement, at least")
    parser.add_argument("--only", nargs="+", choices=CROWDS, default=list(CROWDS))
    return parser.parse_args()


async def measure(gateway: Gateway, folder: Path, crowd: Crowd, seconds: float, every_s: float) -> dict[str, float]:
    """Measure the honest callers' chats beside a crowd, for at least `seconds`, and until the crowd is LEAST.

    every_s: between the times when two chats of a caller are due; 0: one is due when the one before is answered.
    """
    request = http_request(gateway)
    latencies: list[float] = []
    failed = 0
    async with connected(gateway, HONEST) as clients:
        for client in clients:  # a connection's first chat is not counted
            await client.send(request)
        async with crowd(gateway, folder) as figures:
            began = time.perf_counter()
            ended = began + seconds if figures.get("crowd", LEAST) >= LEAST else math.inf

            def is_due(at: float) -> bool:
                """Also after the end for what was due before: a caller may have waited for an answer."""
                nonlocal ended
                if ended == math.inf and figures["crowd"] >= LEAST:
                    ended = max(began + seconds, time.perf_counter())
                return at < ended

            async def call(client: Client, number: int) -> None:
                nonlocal failed
                due = began + every_s * number / HONEST
                while is_due(due):
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    try:
                        took = await client.send(request)
                        latencies.append(time.perf_counter() - due if every_s else took)
                    except ChatFailed:
                        failed += 1
                    due = due + every_s if every_s else time.perf_counter()

            await asyncio.gather(*(call(client, number) for number, client in enumerate(clients)))
            lasted = time.perf_counter() - began
    latencies.sort()
    p50, p99 = (1000 * latencies[int(len(latencies) * share)] for share in (0.5, 0.99))
    waits = {"p50_ms": p50, "p99_ms": p99, "slowest_ms": 1000 * latencies[-1]}
    return {"chats": len(latencies), "seconds": lasted, "failed": failed, **waits, **figures}


def summary(turns: dict[str, list[dict[str, float]]], longer_at_most_ms: float | None = None) -> dict[str, Any]:
    """Medians over the turns, of the figures and of the ratios, and whether both bounds hold.

    longer_at_most_ms: how much longer the slowest chat may take beside the crowd, in the median; None: no bound.
    """
    medians = {
        who: {key: statistics.median(each[key] for each in figures) for key in figures[0]}
        for who, figures in turns.items()
    }
    pairs = list(zip(turns["alone"], turns["beside"], strict=True))
    ratios = [beside["p99_ms"] / alone["p99_ms"] for alone, beside in pairs]
    longer = [beside["slowest_ms"] - alone["slowest_ms"] for alone, beside in pairs]
    failed = sum(figures["failed"] for each in turns.values() for figures in each)
    ratio = statistics.median(ratios)
    in_time = longer_at_most_ms is None or statistics.median(longer) <= longer_at_most_ms
    holds = ratio <= AT_MOST and in_time and not failed
    figures = {"p99_ratios": ratios, "p99_ratio": ratio, "at_most": AT_MOST, "failed": failed, "holds": holds}
    return {**medians, **figures, "slowest_waits_longer_ms": longer, "longer_at_most_ms": longer_at_most_ms}


if __name__ == "__main__":
    main()
