"""`python -m benchmarks.agent_sdk`: see __init__.py."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmarks.agent_sdk
from benchmarks.agent_sdk import PARTS, ROOT

sys.path.insert(0, str(ROOT / "agent_sdk"))

from benchmarks.agent_sdk import learning, production
from benchmarks.agent_sdk.servers import server

DEAD = "http://127.0.0.1:9"


def import_s() -> dict[str, float]:
    """Seconds that the imports take in a fresh process; the best of five."""

    def best(code: str) -> float:
        found = []
        for _ in range(5):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], cwd=ROOT / "agent_sdk", check=True)
            found.append(time.perf_counter() - began)
        return min(found)

    alone, both = best("import openai"), best("import openai, flywheel")
    return {"openai_s": alone, "with_flywheel_s": both, "added_s": both - alone}


def wheel_kb() -> float:
    """Size of the wheel, in kB."""
    with tempfile.TemporaryDirectory() as folder:
        source = shutil.copytree(ROOT / "agent_sdk", Path(folder) / "source")  # a build leaves files there
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder]
        subprocess.run([*command, str(source)], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        return wheel.stat().st_size / 1000


def beside_production(url: str, share: int) -> dict[str, Any]:
    """How a runner affects production, in each state of the explorer."""
    seconds = 15 / share
    found: dict[str, Any] = {"nothing_selected_added_us": production.added_us(url, 20_000 // share)}
    found["nothing_selected"] = production.latencies_ms(url, seconds, 0.0)
    found["a_tenth"] = production.latencies_ms(url, seconds, 0.1)
    found["a_tenth_explorer_dead"] = production.latencies_ms(DEAD, seconds, 0.1)
    for kind in ("hanging", "broken"):
        with server(kind) as other:
            found[f"a_tenth_explorer_{kind}"] = production.latencies_ms(other, seconds, 0.1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=benchmarks.agent_sdk.__doc__)
    parser.add_argument("--share", type=int, default=1, help="10 makes a tenth of the calls")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    args = parser.parse_args()
    share = args.share
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, server("explorer") as url:
        folder = Path(name)
        parts: dict[str, Callable[[], Any]] = {
            "import": import_s,
            "wheel_kb": wheel_kb,
            "production": lambda: beside_production(url, share),
            "chat_cpu": lambda: asyncio.run(production.chat_cpu(url, 1000 // share)),
            "learn": lambda: learning.beside_bare(url, 1000 // share, folder),
            "memory": lambda: learning.memory(url, 20_000 // share, folder),
            "overload": lambda: learning.overload(600 // share, folder),
        }
        for part, measure in parts.items():
            if part in args.only:
                report[part] = measure()
                print(part, json.dumps(report[part]), file=sys.stderr, flush=True)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
