"""What the explorer costs a chat, beside its peers in the same run. Prints one JSON line.

One pinned core for the gateway, the other for a fake engine with pre-encoded replies and for the clients. CPU time is
the gateway's own, of all its threads and processes, from /proc. Added latency is over the same chats sent to the
engine directly. Ours records durably (SQLite, WAL, synchronous=FULL); Trinity-RFT's proxy records with its own SQLite
recorder; LiteLLM's proxy records nothing. The gateways are measured in turns; a figure is the median of its turns.

    .venv/bin/python -m benchmarks.front_door [--peers PYTHON] [--requests 2000] [--turns 3] [--only flywheel ...]
    .venv/bin/python -m benchmarks.front_door --soak 200000     # memory over so many recorded chats, instead

--peers: the Python of a virtual environment with trinity-rft==0.6.0 (--no-deps) and litellm[proxy], torch, ray,
sortedcontainers, dill, omegaconf, datasets, tensorboard, sqlalchemy[asyncio], aiosqlite, word2number, httpx.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import uvloop

REPOSITORY = Path(__file__).parents[1]
SIZES = ((100, 64), (1024, 256))  # prompt and reply tokens
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


async def connect(port: int) -> Client:
    _, protocol = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    return protocol


def cpu_s(gateway: psutil.Process | None) -> float:
    """CPU seconds of the gateway and its children, user and system, from /proc."""
    if gateway is None:
        return 0.0
    family = [gateway, *gateway.children(recursive=True)]
    return sum(process.cpu_times().user + process.cpu_times().system for process in family)


async def measure_chats(port: int, gateway: psutil.Process | None, in_flight: int, requests: int) -> dict[str, float]:
    """Plain chats, `in_flight` at once. Needed: a direct engine answers them with its logprobs, as the gateway asks."""
    more = {"logprobs": True, "return_token_ids": True} if gateway is None else {}
    request = http_request(port, **more)
    clients = [await connect(port) for _ in range(in_flight)]
    for client in clients:
        await client.ask(request)
    latencies: list[float] = []

    async def customer(client: Client, share: int) -> None:
        for _ in range(share):
            latencies.append(await client.ask(request))

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
    clients = [await connect(port) for _ in range(in_flight)]
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
            client = await connect(port)
            await asyncio.wait_for(client.ask(http_request(port)), 10)
            return
        except (OSError, RuntimeError, TimeoutError) as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"no answer on port {port} after {limit_s:g} s: {error!r}") from error
            await asyncio.sleep(0.3)


async def measure(port: int, gateway: psutil.Process | None, requests: int, streams: bool) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for in_flight in (1, 32):
        await measure_chats(port, gateway, in_flight, max(64, requests // 10))  # warm
        result[f"chats_{in_flight}"] = await measure_chats(port, gateway, in_flight, requests)
    for in_flight in (1, 16, 64) if streams else ():
        result[f"streams_{in_flight}"] = await measure_streams(port, gateway, in_flight, max(2, 16 // in_flight))
    if streams:  # as many, but begun over a stream's whole length, as in a steady state
        result["streams_64_steady"] = await measure_streams(port, gateway, 64, 2, within_s=1.28)
    return result


async def soak(port: int, gateway: psutil.Process, chats: int, parts: int = 10) -> dict[str, Any]:
    """Resident memory of the gateway after each part of so many chats, 32 in flight."""
    resident = []
    started = time.perf_counter()
    for _ in range(parts):
        await measure_chats(port, gateway, 32, chats // parts)
        resident.append(round(gateway.memory_info().rss / 2**20, 1))
    return {"chats": chats, "chats_per_s": chats / (time.perf_counter() - started), "resident_mb": resident}


def compare(ours: dict[str, Any], direct: dict[str, Any], peer: dict[str, Any]) -> dict[str, float]:
    """Ours over a peer's, in what the peer has."""
    ratios = {}
    for load in ("chats_1", "chats_32"):
        ratios[f"{load}_cpu"] = ours[load]["cpu_ms_per_chat"] / peer[load]["cpu_ms_per_chat"]
        for percentile in ("p50_ms", "p99_ms"):
            added = ours[load][percentile] - direct[load][percentile]
            ratios[f"{load}_added_{percentile[:3]}"] = added / (peer[load][percentile] - direct[load][percentile])
    for load in ours:
        if load.startswith("streams"):
            ratios[f"{load}_cpu"] = ours[load]["cpu_ms_per_event"] / peer[load]["cpu_ms_per_event"]
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=None)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=["flywheel", "trinity", "litellm"])
    parser.add_argument("--no-streams", action="store_true")
    parser.add_argument("--soak", type=int, default=None, metavar="CHATS")
    args = parser.parse_args()
    os.sched_setaffinity(0, {OTHER_CORE})
    report: dict[str, Any] = {}
    if args.soak:
        print(json.dumps(_rounded(run_soak(args.soak))))
        return
    for n_prompt, n_reply in SIZES:
        report[f"{n_prompt}+{n_reply}"] = run_size(
            args, n_prompt, n_reply, streams=n_reply == 64 and not args.no_streams
        )
    print(json.dumps(_rounded(report)))


def run_size(args: argparse.Namespace, n_prompt: int, n_reply: int, streams: bool) -> dict[str, Any]:
    """Every gateway in turns, freshly started each time: the machine's drift meets all. Medians of the turns."""
    turns: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="flywheel-front-door-", dir=REPOSITORY) as name:
        folder = Path(name)
        upstream = free_port()
        command = [sys.executable, "-m", "benchmarks.upstream", str(upstream), str(n_prompt), str(n_reply)]
        with running(command, OTHER_CORE, folder / "upstream.log"):
            uvloop.run(wait_answering(upstream))
            for turn in range(args.turns):
                direct = uvloop.run(measure(upstream, None, args.requests, streams))
                turns.setdefault("direct", []).append(direct)
                own = folder / str(turn)
                own.mkdir()
                for gateway, measured in run_gateways(args, upstream, own, streams):
                    print(f"turn {turn + 1} of {args.turns}: {gateway}", file=sys.stderr)
                    turns.setdefault(gateway, []).append(measured)
    results = {gateway: _medians(measured) for gateway, measured in turns.items()}
    if "flywheel" in results:
        ours = results["flywheel"]
        for peer in ("trinity", "litellm"):
            if peer in results:
                results[f"flywheel / {peer}"] = compare(ours, results["direct"], results[peer])
        for load in ours:
            for figure in ("p50_ms", "p99_ms", "first_event_p50_ms", "gap_p50_ms"):
                if figure in ours[load]:
                    ours[load][f"added_{figure}"] = ours[load][figure] - results["direct"][load][figure]
    return results


def run_gateways(
    args: argparse.Namespace, upstream: int, folder: Path, streams: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each gateway's figures of one turn."""
    gateways: dict[str, Any] = {"flywheel": lambda port: flywheel_command(upstream, port, folder)}
    if args.peers:
        gateways["trinity"] = lambda port: trinity_command(args.peers, upstream, port, folder)
        gateways["litellm"] = lambda port: litellm_command(args.peers, upstream, port, folder)
    for gateway, make_command in gateways.items():
        if gateway in args.only:
            port, log = free_port(), folder / f"{gateway}.log"
            with running(make_command(port), GATEWAY_CORE, log, LITELLM_LOCAL_MODEL_COST_MAP="True") as process:
                uvloop.run(wait_answering(port))
                yield gateway, uvloop.run(measure(port, process, args.requests, streams))


def _medians(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure; of the number of events the least and the most."""
    pick = {"events_min": min, "events_max": max}
    return {
        load: {
            figure: pick.get(figure, statistics.median)([turn[load][figure] for turn in turns]) for figure in figures
        }
        for load, figures in turns[0].items()
    }


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
