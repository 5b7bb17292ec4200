"""What the explorer costs a chat, beside its peers in the same run. Prints one JSON line.

One pinned core for the gateways, the other for a fake engine with pre-encoded replies and for the clients. CPU time is
that of the gateway's processes, what /proc shows in ticks, by the kernel's clock. Added latency is over the same chats
sent to the engine directly. Ours records durably (SQLite, WAL, synchronous=FULL); Trinity-RFT's proxy records with its
own SQLite recorder; LiteLLM's proxy records nothing.

The gateways run at the same time and are loaded one after the other, a few seconds each, in many turns: the pace of a
machine drifts by half within minutes, and meets all of them alike. A figure is the median of its turns, and what we
take in proportion to a peer the median of the turns' proportions.

    .venv/bin/python -m benchmarks.front_door [--peers PYTHON] [--requests 400] [--turns 7] [--only flywheel ...]
    .venv/bin/python -m benchmarks.front_door --soak 200000     # memory over so many recorded chats, instead

--peers: the Python of a virtual environment with trinity-rft==0.6.0 (--no-deps) and litellm[proxy], torch, ray,
sortedcontainers, dill, omegaconf, datasets, tensorboard, sqlalchemy[asyncio], aiosqlite, word2number, httpx.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import uvloop

REPOSITORY = Path(__file__).parents[1]
SIZES = ((100, 64), (1024, 256))  # prompt and reply tokens
PEERS = ("trinity", "litellm")
GATEWAY_CORE, OTHER_CORE = 0, 1
PATH = "/v1/chat/completions"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], core: int, log: Path, **environ: str) -> Iterator[psutil.Process]:
    """A process pinned to one core, ended with all it started."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **environ},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),  # noqa: PLW1509
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def flywheel_command(upstream: int, port: int, folder: Path) -> list[str]:
    file = folder / "flywheel.yaml"
    engines = f'[{{name: e0, url: "http://127.0.0.1:{upstream}"}}]'
    file.write_text(
        f"root_dir: {folder}/data\nmodel: {{path: {folder}}}\nexplorer: {{port: {port}, engines: {engines}}}\n"
    )
    return [sys.executable, "-m", "services.cli", "explorer", "-c", str(file)]


def trinity_command(peers: str, upstream: int, port: int, folder: Path) -> list[str]:
    url = f"http://127.0.0.1:{upstream}"
    return [peers, "-m", "benchmarks.peers.trinity_proxy", url, str(port), str(folder / "trinity.db")]


def litellm_command(peers: str, upstream: int, port: int, folder: Path) -> list[str]:
    file = folder / "litellm.yaml"
    url = f"http://127.0.0.1:{upstream}/v1"
    file.write_text(
        "model_list:\n- model_name: agent\n  litellm_params: {model: openai/agent, api_key: none, "
        f'api_base: "{url}"}}\nlitellm_settings: {{telemetry: false}}\n'
        "general_settings: {dangerously_permit_weak_or_unset_master_key: true}\n"
    )
    script = str(Path(peers).with_name("litellm"))
    return [script, "--config", str(file), "--port", str(port), "--host", "127.0.0.1"]


class Client(asyncio.Protocol):
    """One keep-alive connection that counts what comes back. Quick, so that the gateway is what is measured."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._done: asyncio.Future[None] | None = None
        self._need = -1  # bytes of the whole answer; -1: not known yet; -2: ends with the last chunk
        self.arrivals: list[float] = []  # of a stream's events
        self.status = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one by its methods alone

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("closed"))

    def close(self) -> None:
        self._transport.close()

    async def ask(self, request: bytes) -> float:
        """Send, wait for all of the answer; seconds."""
        self._buffer.clear()
        self.arrivals.clear()
        self._need = -1
        self._done = asyncio.get_running_loop().create_future()
        started = time.perf_counter()
        self._transport.write(request)
        await self._done
        if self.status != 200:
            raise RuntimeError(f"answered {self.status}: {bytes(self._buffer[:500])!r}")
        return time.perf_counter() - started

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._buffer += data
        if self._need == -1:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            self.status = int(head[9:12])
            at = head.find(b"content-length:")
            self._need = end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else -2
        if self._need == -2:
            self.arrivals += [now] * data.count(b"data: ")
        whole = self._buffer.endswith(b"\r\n0\r\n\r\n") if self._need == -2 else len(self._buffer) >= self._need
        if whole and self._done is not None and not self._done.done():
            self._done.set_result(None)


def http_request(port: int, **more: Any) -> bytes:
    messages = [{"role": "user", "content": "Where is my parcel? " * 20}]
    body = json.dumps({"model": "agent", "messages": messages, "temperature": 0.8, **more}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Authorization: Bearer none\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def connected(port: int, count: int) -> AsyncIterator[list[Client]]:
    """So many clients, whose connections are closed at the end: open ones would count as the gateway's memory."""
    clients = [(await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port))[1] for _ in range(count)]
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


def cpu_s(gateway: psutil.Process | None) -> float:
    """CPU seconds of the gateway and its children, user and system, threads that have ended too."""
    if gateway is None:
        return 0.0
    return sum(_cpu_s(process.pid) for process in [gateway, *gateway.children(recursive=True)])


def _cpu_s(pid: int) -> float:
    clock = ctypes.c_int()
    if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise ProcessLookupError(pid)
    return time.clock_gettime(clock.value)


async def measure_chats(port: int, gateway: psutil.Process | None, in_flight: int, requests: int) -> dict[str, float]:
    """Plain chats, `in_flight` at once. Needed: a direct engine answers them with its logprobs, as the gateway asks."""
    more = {"logprobs": True, "return_token_ids": True} if gateway is None else {}
    request = http_request(port, **more)
    latencies: list[float] = []

    async def customer(client: Client, share: int) -> None:
        for _ in range(share):
            latencies.append(await client.ask(request))

    async with connected(port, in_flight) as clients:
        for client in clients:
            await client.ask(request)
        before, started = cpu_s(gateway), time.perf_counter()
        await asyncio.gather(*(customer(client, requests // in_flight) for client in clients))
        seconds, used = time.perf_counter() - started, cpu_s(gateway) - before
    latencies.sort()
    return {
        "chats_per_s": len(latencies) / seconds,
        "cpu_ms_per_chat": 1000 * used / len(latencies),
        "p50_ms": 1000 * latencies[len(latencies) // 2],
        "p99_ms": 1000 * latencies[int(len(latencies) * 0.99)],
    }


async def measure_streams(
    port: int, gateway: psutil.Process | None, in_flight: int, rounds: int, within_s: float = 0.02
) -> dict[str, float]:
    """Streams of 64 events at 20 ms, that begin one after the other within so many seconds."""
    more = {"logprobs": True, "return_token_ids": True} if gateway is None else {}
    request = http_request(port, stream=True, **more)
    firsts: list[float] = []
    gaps: list[float] = []
    counts: set[int] = set()

    async def listener(client: Client, number: int) -> None:
        await asyncio.sleep(within_s * number / in_flight)
        for _ in range(rounds):
            started = time.perf_counter()
            await client.ask(request)
            firsts.append(client.arrivals[0] - started)
            gaps.extend(b - a for a, b in zip(client.arrivals, client.arrivals[1:], strict=False))
            counts.add(len(client.arrivals))

    async with connected(port, in_flight) as clients:
        before = cpu_s(gateway)
        await asyncio.gather(*(listener(client, number) for number, client in enumerate(clients)))
        used = cpu_s(gateway) - before
    return {
        "first_event_p50_ms": 1000 * statistics.median(firsts),
        "gap_p50_ms": 1000 * statistics.median(gaps),
        "gap_p99_ms": 1000 * sorted(gaps)[int(len(gaps) * 0.99)],
        "cpu_ms_per_event": 1000 * used / (len(gaps) + len(firsts)),
        "events_min": min(counts),
        "events_max": max(counts),
    }


async def wait_answering(port: int, limit_s: float = 90.0) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            async with connected(port, 1) as (client,):
                await asyncio.wait_for(client.ask(http_request(port)), 10)
            return
        except (OSError, RuntimeError, TimeoutError) as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"no answer on port {port} after {limit_s:g} s: {error!r}") from error
            await asyncio.sleep(0.3)


# One load each: the port, the gateway (None: the engine itself) and how many plain chats.
Load = Callable[[int, psutil.Process | None, int], Coroutine[Any, Any, dict[str, float]]]
CHATS: dict[str, Load] = {
    "chats_1": lambda port, gateway, requests: measure_chats(port, gateway, 1, requests),
    "chats_32": lambda port, gateway, requests: measure_chats(port, gateway, 32, 2 * requests),
}
STREAMS: dict[str, Load] = {
    "streams_1": lambda port, gateway, _: measure_streams(port, gateway, 1, 6),
    "streams_16": lambda port, gateway, _: measure_streams(port, gateway, 16, 2),
    "streams_64": lambda port, gateway, _: measure_streams(port, gateway, 64, 2),
    # as many, but begun over a stream's whole length, as in a steady state
    "streams_64_steady": lambda port, gateway, _: measure_streams(port, gateway, 64, 2, within_s=1.28),
}


async def soak(port: int, gateway: psutil.Process, chats: int, parts: int = 10) -> dict[str, Any]:
    """Resident memory of the gateway after each part of so many chats, 32 in flight."""
    resident = []
    started = time.perf_counter()
    for _ in range(parts):
        await measure_chats(port, gateway, 32, chats // parts)
        resident.append(round(gateway.memory_info().rss / 2**20, 1))
    return {"chats": chats, "chats_per_s": chats / (time.perf_counter() - started), "resident_mb": resident}


def compare(ours: dict[str, float], direct: dict[str, float], peer: dict[str, float]) -> dict[str, float]:
    """Ours over a peer's, of one load in one turn."""
    ratios = {}
    for figure in ("cpu_ms_per_chat", "cpu_ms_per_event"):
        if figure in ours:
            ratios["cpu"] = ours[figure] / peer[figure]
    for figure in ("p50_ms", "p99_ms"):
        if figure in ours:
            ratios[f"added_{figure}"] = (ours[figure] - direct[figure]) / (peer[figure] - direct[figure])
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=None)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=["flywheel", *PEERS])
    parser.add_argument("--no-streams", action="store_true")
    parser.add_argument("--soak", type=int, default=None, metavar="CHATS")
    args = parser.parse_args()
    os.sched_setaffinity(0, {OTHER_CORE})
    report: dict[str, Any] = {}
    if args.soak:
        print(json.dumps(_rounded(run_soak(args.soak))))
        return
    for n_prompt, n_reply in SIZES:
        loads = CHATS | STREAMS if n_reply == 64 and not args.no_streams else CHATS
        report[f"{n_prompt}+{n_reply}"] = run_size(args, n_prompt, n_reply, loads)
    print(json.dumps(_rounded(report)))


def run_size(args: argparse.Namespace, n_prompt: int, n_reply: int, loads: dict[str, Load]) -> dict[str, Any]:
    """Every load of every gateway, in turns: the medians."""
    turns: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory(prefix="flywheel-front-door-", dir=REPOSITORY) as name, ExitStack() as stack:
        folder, upstream = Path(name), free_port()
        command = [sys.executable, "-m", "benchmarks.upstream", str(upstream), str(n_prompt), str(n_reply)]
        stack.enter_context(running(command, OTHER_CORE, folder / "upstream.log"))
        gateways = start_gateways(args, upstream, folder, stack)
        for turn in range(args.turns):
            print(f"{n_prompt} + {n_reply} tokens: turn {turn + 1} of {args.turns}", file=sys.stderr)
            for load, measure in loads.items():
                measured = {
                    gateway: uvloop.run(measure(port, process, args.requests))
                    for gateway, (port, process) in gateways.items()
                }
                ours = measured.get("flywheel")
                for gateway, figures in list(measured.items()):
                    if ours and gateway in PEERS:
                        measured[f"flywheel / {gateway}"] = compare(ours, measured["direct"], figures)
                if ours:
                    for figure in ("p50_ms", "p99_ms", "first_event_p50_ms", "gap_p50_ms"):
                        if figure in ours:
                            ours[f"added_{figure}"] = ours[figure] - measured["direct"][figure]
                for gateway, figures in measured.items():
                    turns.setdefault(gateway, {}).setdefault(load, []).append(figures)
    return {gateway: {load: _medians(figures) for load, figures in of.items()} for gateway, of in turns.items()}


def start_gateways(
    args: argparse.Namespace, upstream: int, folder: Path, stack: ExitStack
) -> dict[str, tuple[int, psutil.Process | None]]:
    """All that are asked for, running and warm, and the engine itself: their ports and processes."""
    commands: dict[str, Any] = {"flywheel": lambda port: flywheel_command(upstream, port, folder)}
    if args.peers:
        commands["trinity"] = lambda port: trinity_command(args.peers, upstream, port, folder)
        commands["litellm"] = lambda port: litellm_command(args.peers, upstream, port, folder)
    gateways: dict[str, tuple[int, psutil.Process | None]] = {"direct": (upstream, None)}
    for gateway, make_command in commands.items():
        if gateway in args.only:
            port, log = free_port(), folder / f"{gateway}.log"
            started = running(make_command(port), GATEWAY_CORE, log, LITELLM_LOCAL_MODEL_COST_MAP="True")
            gateways[gateway] = port, stack.enter_context(started)
    for port, process in gateways.values():
        uvloop.run(wait_answering(port))
        uvloop.run(measure_chats(port, process, 32, args.requests))
        uvloop.run(measure_streams(port, process, 16, 1))
    return gateways


def _medians(turns: list[dict[str, float]]) -> dict[str, float]:
    """Of each figure; of the number of events the least and the most."""
    pick = {"events_min": min, "events_max": max}
    return {figure: pick.get(figure, statistics.median)([turn[figure] for turn in turns]) for figure in turns[0]}


def run_soak(chats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="flywheel-front-door-", dir=REPOSITORY) as name:
        folder, upstream, port = Path(name), free_port(), free_port()
        command = [sys.executable, "-m", "benchmarks.upstream", str(upstream), "100", "64"]
        with running(command, OTHER_CORE, folder / "upstream.log"):
            ours = flywheel_command(upstream, port, folder)
            with running(ours, GATEWAY_CORE, folder / "flywheel.log") as gateway:
                uvloop.run(wait_answering(port))
                return uvloop.run(soak(port, gateway, chats))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
