"""`python -m benchmarks.front_door`: see __init__.py."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import benchmarks.front_door
from benchmarks.front_door import load
from benchmarks.front_door.client import wait_ready
from benchmarks.front_door.figures import Turns, add_latencies, rounded, summarize, targets
from benchmarks.front_door.gateways import NAMES, OTHER_CORE, REPOSITORY, Gateway, start_gateways, start_upstream
from benchmarks.front_door.running import end_on_sigterm, run

SMALL, LARGE = (100, 64), (1024, 256)  # prompt and reply tokens


def main() -> None:
    args = _arguments()
    end_on_sigterm()
    os.sched_setaffinity(0, {OTHER_CORE})
    report: dict[str, Any] = {}
    for size in (SMALL, LARGE):
        if args.turns:
            loads = load.CHATS | load.STREAMS if size == SMALL and not args.no_streams else load.CHATS
            report[_named(size)] = run_size(args, size, loads)
    if args.soak:
        try:
            report["soak"] = run_soak(args)
        except load.LoadFailed as error:
            report["soak"] = {"turns_counted": 0, "turns_dropped": [error.as_json()]}
    report["targets"] = targets(report, SMALL[1], _named(SMALL), _named(LARGE))
    print(json.dumps(rounded(report)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=benchmarks.front_door.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=_file, metavar="PYTHON")
    parser.add_argument("--against", type=_checkout, metavar="DIRECTORY")
    parser.add_argument("--seconds", type=float, default=3.0, help="of plain chats, for each load of each gateway")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--no-streams", action="store_true")
    parser.add_argument("--soak", type=int, default=200_000, metavar="CHATS")
    return parser.parse_args()


def _file(text: str) -> str:
    """An absolute path, links not resolved: a virtual environment's Python is a link."""
    path = Path(text).absolute()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a file")
    return str(path)


def _checkout(text: str) -> Path:
    path = Path(text).resolve()
    if not (path / "services" / "cli.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a checkout of Flywheel: it has no services/cli.py")
    return path


def _named(size: tuple[int, int]) -> str:
    return f"{size[0]}+{size[1]}"


def run_size(args: argparse.Namespace, size: tuple[int, int], loads: dict[str, load.Load]) -> dict[str, Any]:
    """Run every load of every gateway, in turns. A turn in which a gateway fails wholly is dropped, and reported."""
    turns: Turns = {}
    dropped: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="flywheel-front-door-", dir=REPOSITORY) as name, ExitStack() as stack:
        gateways = _ready(args, size, args.only, Path(name), stack)
        for turn in range(args.turns):
            print(f"{_named(size)} tokens: turn {turn + 1} of {args.turns}", file=sys.stderr)
            try:
                measured = run_turn(gateways, loads, args.seconds)
            except load.LoadFailed as error:
                dropped.append(error.as_json())
                continue
            for what, by_gateway in measured.items():
                for gateway, figures in by_gateway.items():
                    turns.setdefault(gateway, {}).setdefault(what, []).append(figures)
            gateways.reverse()  # so that no gateway always follows the same one
    return summarize(turns) | {"turns_counted": args.turns - len(dropped), "turns_dropped": dropped}


def run_turn(
    gateways: list[Gateway], loads: dict[str, load.Load], seconds: float
) -> dict[str, dict[str, load.Figures]]:
    """Run every load of every gateway once: load -> gateway -> figures."""
    measured = {}
    for what, measure in loads.items():
        by_gateway = {each.name: run(load.run_load(measure, each, seconds)) for each in gateways}
        add_latencies(by_gateway)
        measured[what] = by_gateway
    measured["idle"] = run(load.measure_idle([each for each in gateways if each.process]))
    return measured


def run_soak(args: argparse.Namespace) -> dict[str, Any]:
    ours = tuple(name for name in args.only if name in ("flywheel", "before"))
    with tempfile.TemporaryDirectory(prefix="flywheel-front-door-", dir=REPOSITORY) as name, ExitStack() as stack:
        gateways = _ready(args, SMALL, ours, Path(name), stack)
        print(f"soak: {args.soak} chats each", file=sys.stderr)
        return run(load.soak([gateway for gateway in gateways if gateway.process], args.soak))


def _ready(
    args: argparse.Namespace, size: tuple[int, int], names: tuple[str, ...], folder: Path, stack: ExitStack
) -> list[Gateway]:
    """The fake engine and the gateways, running and warm."""
    upstream = start_upstream(*size, folder, stack)
    gateways = start_gateways(tuple(names), args.peers, args.against, upstream, folder, stack)
    for gateway in gateways:
        run(wait_ready(gateway))
        with contextlib.suppress(load.LoadFailed):
            run(load.run_load(load.warm_up, gateway, args.seconds))
    return gateways


if __name__ == "__main__":
    main()
