"""`python -m benchmarks.crowds`: see __init__.py."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop

import benchmarks.crowds
from benchmarks.crowds.crowds import CROWDS, TARGETS, Crowd, nobody
from benchmarks.front_door.client import ChatFailed, Client, connected, http_request, wait_ready
from benchmarks.front_door.figures import rounded
from benchmarks.front_door.gateways import OTHER_CORE, REPOSITORY, Gateway, start_gateways, start_upstream
from benchmarks.front_door.load import measure_chats

HONEST = 32
LEAST = 2  # of a crowd, also of requests that it sends one after the other
STEADY_PAUSE_S = 0.05  # between two chats of a caller
AT_MOST = 2.0  # relative to the p99 of the same callers alone
PROMPT, REPLY = 100, 64  # tokens


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # ends the processes that it started
    os.sched_setaffinity(0, {OTHER_CORE})
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory(prefix="flywheel-crowds-", dir=REPOSITORY) as name, ExitStack() as stack:
        folder = Path(name)
        upstream = start_upstream(PROMPT, REPLY, folder, stack, "benchmarks.crowds.engine")
        _, gateway = start_gateways(("flywheel",), None, None, upstream, folder, stack)
        uvloop.run(wait_ready(gateway))
        uvloop.run(measure_chats(gateway, HONEST, TARGETS + 2 * HONEST))  # warm, and rows to rate
        for turn in range(args.turns):
            print(f"turn {turn + 1} of {args.turns}", file=sys.stderr)
            for load, pause_s in (("busy", 0.0), ("steady", STEADY_PAUSE_S)):
                for crowd in args.only:
                    of_crowd = found.setdefault(f"{crowd}, {load}", {"alone": [], "beside": []})
                    seconds = args.seconds
                    for who, beside in (("beside", CROWDS[crowd]), ("alone", nobody)):
                        figures = uvloop.run(measure(gateway, folder, beside, seconds, pause_s))
                        of_crowd[who].append(figures)
                        seconds = figures["seconds"]  # alone for as long: the slowest of more chats is slower
    print(json.dumps(rounded({name: summary(turns) for name, turns in found.items()})))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=benchmarks.crowds.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one measurement, at least")
    parser.add_argument("--only", nargs="+", choices=CROWDS, default=list(CROWDS))
    return parser.parse_args()


async def measure(gateway: Gateway, folder: Path, crowd: Crowd, seconds: float, pause_s: float) -> dict[str, float]:
    """Measure the honest callers' chats beside a crowd, for at least `seconds`, and until the crowd is LEAST."""
    request = http_request(gateway)
    latencies: list[float] = []
    failed = 0
    async with connected(gateway, HONEST) as clients:
        for client in clients:  # a connection's first chat is not counted
            await client.send(request)
        async with crowd(gateway, folder) as figures:
            began = time.perf_counter()

            def goes_on() -> bool:
                return time.perf_counter() < began + seconds or figures.get("crowd", LEAST) < LEAST

            async def call(client: Client, number: int) -> None:
                nonlocal failed
                await asyncio.sleep(pause_s * number / HONEST)
                while goes_on():
                    try:
                        latencies.append(await client.send(request))
                    except ChatFailed:
                        failed += 1
                    await asyncio.sleep(pause_s)

            await asyncio.gather(*(call(client, number) for number, client in enumerate(clients)))
            took = time.perf_counter() - began
    latencies.sort()
    p50, p99 = (1000 * latencies[int(len(latencies) * share)] for share in (0.5, 0.99))
    waits = {"p50_ms": p50, "p99_ms": p99, "slowest_ms": 1000 * latencies[-1]}
    return {"chats": len(latencies), "seconds": took, "failed": failed, **waits, **figures}


def summary(turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over the turns, of the figures and of the ratios."""
    medians = {
        who: {key: statistics.median(each[key] for each in figures) for key in figures[0]}
        for who, figures in turns.items()
    }
    pairs = list(zip(turns["alone"], turns["beside"], strict=True))
    ratios = [beside["p99_ms"] / alone["p99_ms"] for alone, beside in pairs]
    longer = [beside["slowest_ms"] - alone["slowest_ms"] for alone, beside in pairs]
    failed = sum(figures["failed"] for each in turns.values() for figures in each)
    ratio = statistics.median(ratios)
    holds = ratio <= AT_MOST and not failed
    figures = {"p99_ratios": ratios, "p99_ratio": ratio, "at_most": AT_MOST, "failed": failed, "holds": holds}
    return {**medians, **figures, "slowest_waits_longer_ms": longer}


if __name__ == "__main__":
    main()
