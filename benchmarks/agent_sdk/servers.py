"""Servers to measure against: `python -m benchmarks.agent_sdk.servers KIND` prints an address.

KIND: explorer, over a scripted engine; trained, the same with a real trainer, which prints what happened to the rows
when its input ends; hanging, which accepts every request and never answers; broken, which answers 500.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from benchmarks.agent_sdk import ROOT

# Rows of an update, and passes over them: chosen so that the workers are at least three times as fast as the trainer.
BATCH = 16
EPOCHS = 4


@contextmanager
def server(kind: str, found: dict[str, Any] | None = None) -> Iterator[str]:
    """The address of a server in its own process. found: receives what it prints at its end."""
    command = [sys.executable, "-m", "benchmarks.agent_sdk.servers", kind]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(line.strip() for line in process.stdout if line.startswith("http"))  # libraries also print
        finally:
            said, _ = process.communicate("")
        if found is not None:
            found.update(json.loads(said.splitlines()[-1]))


def serve_explorer() -> None:
    from tests.support.scripted_engine import ScriptedEngine
    from tests.support.servers import RunningExplorer, make_config

    with tempfile.TemporaryDirectory() as folder:
        explorer = RunningExplorer(make_config(Path(folder), [ScriptedEngine().url])).wait_ready()
        print(explorer.url, flush=True)
        sys.stdin.read()
        explorer.stop()


def serve_trained() -> None:
    """Run explorer and trainer; then report the trained rows, their staleness, and the discarded rows."""
    from shared.ledger.connect import Ledger
    from tests.support.models import make_tiny_model
    from tests.support.scripted_engine import ScriptedEngine
    from tests.support.servers import wait_until
    from tests.torture.whole import PARTS, Whole

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = Whole(folder, make_tiny_model(folder / "base"), ScriptedEngine().url, "sqlite")
        try:
            breaker = whole.config.trainer.breaker.model_copy(update={"reward_drop": None})  # rewards mean nothing here
            whole.finish(
                batch_size=BATCH, epochs=EPOCHS, batch_timeout_s=5.0, max_staleness_versions=8, breaker=breaker
            )
            wait_until(lambda: all(_trains(whole.url)), 120)
            print(whole.url, flush=True)
            sys.stdin.read()
            for part in PARTS:
                whole.lives[part].stop()
            ledger = Ledger.open(whole.config.ledger_url)
            print(json.dumps(_staleness(ledger)), flush=True)
            ledger.close()
        finally:
            whole.close()


def _trains(url: str) -> Iterator[bool]:
    import httpx

    try:
        yield httpx.get(f"{url}/ready").status_code == 200
        yield any(trainer["alive"] for trainer in httpx.get(f"{url}/status").json()["trainers"])
    except httpx.TransportError:
        yield False


def _staleness(ledger: Any) -> dict[str, Any]:
    """A row's staleness: versions between the one that sampled it and the parent of the one that trained on it."""
    from shared.ledger.tables import experiences

    behind = experiences.c.consumed_version - 1 - experiences.c.version
    with ledger.read() as connection:
        trained, mean, most = connection.execute(
            select(func.count(), func.avg(behind), func.max(behind)).where(experiences.c.consumed_version.is_not(None))
        ).one()
        grouped = select(experiences.c.state, experiences.c.reason, func.count())
        states = connection.execute(grouped.group_by(experiences.c.state, experiences.c.reason)).all()
    rows = {f"{state} {reason or ''}".strip(): count for state, reason, count in states}
    return {"trained_rows": trained, "mean_staleness": mean and float(mean), "max_staleness": most, "rows": rows}


async def serve_nothing(answer: bytes) -> None:
    """Accept every request and send `answer`; empty: never answer."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                found = re.search(rb"\r\ncontent-length: *(\d+)", head)
                await reader.readexactly(int(found[1]) if found else 0)
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):  # the caller has left
            writer.close()

    listening = await asyncio.start_server(take, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    print(f"http://{host}:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    kind = sys.argv[1]
    if kind in ("hanging", "broken"):
        body = b'{"error": {"message": "on purpose"}}'
        head = b"HTTP/1.1 500 Broken\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        asyncio.run(serve_nothing(head + body if kind == "broken" else b""))
    else:
        {"explorer": serve_explorer, "trained": serve_trained}[kind]()
