"""`python -m benchmarks.reload`: see __init__.py."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import benchmarks.reload
from benchmarks.reload.deltas import measure_deltas
from benchmarks.reload.drain import drain_and_load
from benchmarks.reload.figures import (
    above_ms,
    as_json,
    compare,
    longest_gap_s,
    read_crossed,
    read_recorded,
    read_reloads,
    row_to_first_chat,
    row_to_first_token,
    seconds_of_each,
    slowest_first_s,
    spread,
    summarize,
)
from benchmarks.reload.lora import measure_adapters
from benchmarks.reload.model import make_model
from benchmarks.reload.service import POLL_INTERVAL_S, Service
from benchmarks.reload.turn import LATE_EVERY_S, Callers, Turn

DRAINS = 5  # turns of the peer's method are long and similar


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # ends the processes that it started
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="flywheel-reload-") as name, ExitStack() as stack:
        folder = Path(name)
        if args.delta_steps:
            (folder / "deltas").mkdir()
            report["deltas"] = measure_deltas(folder / "deltas", args.delta_steps)
        if args.adapters:
            report["lora"] = measure_adapters(folder / "lora", args)
        if args.reloads and not args.lora_only:
            model = make_model(folder / "base", tied=args.tied)
            service = Service(folder, model, args.engines, stack, streams="finish" if args.finish else "go_on")
            for streams in args.streams:
                report[f"{streams} streams"] = asyncio.run(run_turns(service, streams, args.reloads, args.chat_every_s))
            if not args.no_fresh:
                report["fresh_engine_equal"] = service.is_fresh_engine_equal(model)
    print(json.dumps(as_json(report), allow_nan=False))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=benchmarks.reload.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reloads", type=int, default=50)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--chat-every-s", type=float, default=LATE_EVERY_S, help="how often a short chat is due")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--finish", action="store_true", help="reload.streams: finish, for several engines")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--no-fresh", action="store_true")
    parser.add_argument("--delta-steps", type=int, default=20)
    parser.add_argument("--adapters", type=int, default=50)
    parser.add_argument("--lora-only", action="store_true")
    return parser.parse_args()


async def run_turns(service: Service, streams: int, reloads: int, every_s: float) -> dict[str, Any]:
    """Reloads, alternating with runs that reload nothing and have as many short chats; some with the peer's method."""
    turns: dict[str, list[Turn]] = {"none": [], "reload": [], "drain": []}
    seconds: list[dict[str, float]] = []
    prefills: list[float] = []
    async with contextlib.aclosing(Callers(service.url, every_s)) as callers:
        await callers.turn(streams, None)  # not counted: it compiles kernels
        for number in range(reloads):
            print(f"{streams} streams: reload {number + 1} of {reloads}", file=sys.stderr)
            await asyncio.to_thread(service.prepare_version)
            before = read_reloads(await asyncio.to_thread(service.read_metrics))
            turns["reload"].append(await callers.turn(streams, lambda: asyncio.to_thread(service.publish)))
            turns["reload"][-1].row_at = service.publisher.row_at
            after = read_reloads(await asyncio.to_thread(service.read_metrics))
            seconds.append(seconds_of_each(before, after))
            prefills.append(await asyncio.to_thread(measure_prefill, service, turns["reload"][-1]))
            turns["none"].append(await callers.turn(streams, None, len(turns["reload"][-1].late)))
            if number < DRAINS and len(service.engines) == 1:
                turns["drain"].append(await callers.turn(streams, lambda: drain_and_load(service, callers)))
    recorded = read_recorded(service, turns)
    report: dict[str, Any] = {name: summarize(of, recorded) for name, of in turns.items() if of}
    report["reload"] |= {f"{name}_ms": spread([1000 * each[name] for each in seconds]) for name in seconds[0]}
    pairs = list(zip(turns["reload"], turns["none"], strict=True))
    report["reload"]["gap_above_ms"] = compare(above_ms(longest_gap_s, pairs))
    report["reload"]["first_token_above_ms"] = compare(above_ms(slowest_first_s, pairs))
    report["reload"]["prefill_ms"] = spread([1000 * each for each in prefills])
    crossed = read_crossed(service)
    firsts = {
        "row_to_first_token": [row_to_first_token(turn, crossed) for turn in turns["reload"]],
        "row_to_first_chat": [row_to_first_chat(turn) for turn in turns["reload"]],
    }
    report["reload"] |= {f"{name}_ms": spread([1000 * each for each in values]) for name, values in firsts.items()}
    report["reload"] |= within_bounds(turns["reload"], seconds, prefills, service.read_seconds(), firsts)
    return report


def within_bounds(
    turns: list[Turn],
    seconds: list[dict[str, float]],
    prefills: list[float],
    read_s: float,
    firsts: dict[str, list[float]],
) -> dict[str, Any]:
    """The share of reloads within their bounds.

    read_s: time to read the bytes of a version. firsts: by name, seconds that have the bound of the row's first token.
    """
    gap_bounds = [each["pause"] + 1.5 * prefill + 0.1 for each, prefill in zip(seconds, prefills, strict=True)]
    row_bounds = [POLL_INTERVAL_S + 2 * read_s + bound for bound in gap_bounds]
    measured = {
        "gap": ([longest_gap_s(turn) for turn in turns], gap_bounds),
        "late_first_token": ([slowest_first_s(turn) for turn in turns], gap_bounds),
        **{name: (values, row_bounds) for name, values in firsts.items()},
    }
    shares = {
        f"{name}_within_bound": sum(one <= most for one, most in zip(found, bounds, strict=True)) / len(found)
        for name, (found, bounds) in measured.items()
    }
    of = {"gap_bound_ms": gap_bounds, "row_bound_ms": row_bounds}
    return {**shares, **{name: spread([1000 * each for each in bounds]) for name, bounds in of.items()}}


def measure_prefill(service: Service, turn: Turn) -> float:
    """Seconds of one prefill of as many tokens as the streams of a turn had at its event."""
    streams = len(turn.streams)
    length = turn.frozen_tokens // streams
    prompts = [[(n * 31 + k * 7 + time.time_ns()) % 256 for k in range(length)] for n in range(streams)]
    started = time.perf_counter()
    service.ask_engine("POST", "/v1/completions", {"prompt": prompts, "max_tokens": 1})
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
