"""Figures of benchmarks are of what they name."""

from __future__ import annotations

import argparse
import asyncio
import http.server
import threading
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext

import psutil
import pytest

from benchmarks import example_seeds
from benchmarks.front_door import __main__ as front_door
from benchmarks.front_door import load
from benchmarks.front_door.figures import targets
from benchmarks.front_door.gateways import Gateway, free_port
from benchmarks.front_door.load import Figures, LoadFailed
from benchmarks.reload import service
from benchmarks.reload.figures import read_reloads, row_to_first_chat, row_to_first_token, seconds_of_each
from benchmarks.reload.turn import LateChat, Stream, Turn
from benchmarks.trainer import peak

FAILED = "chats and streams that failed"


class Keeping(http.server.BaseHTTPRequestHandler):
    """Answers on connections that stay open."""

    protocol_version = "HTTP/1.1"
    callers: set[tuple[str, int]]

    def do_POST(self) -> None:
        self.callers.add(self.client_address)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def engine() -> Iterator[tuple[str, set[tuple[str, int]]]]:
    """The address of an engine, and the addresses of its callers."""
    callers: set[tuple[str, int]] = set()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Engine", (Keeping,), {"callers": callers})) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", callers
        server.shutdown()


def test_timed_requests_to_an_engine_share_one_client(engine, tmp_path, monkeypatch):
    url, callers = engine
    for name, stand_in in (
        ("_running", lambda *_: nullcontext()),
        ("_wait", lambda *_: None),
        ("Publisher", lambda *_: None),
    ):
        monkeypatch.setattr(service, name, stand_in)
    with ExitStack() as stack:
        measured = service.Service(tmp_path, tmp_path, 1, stack)
        for _ in range(3):
            assert measured.ask_engine("POST", "/v1/completions", {}, url) == {}
    assert len(callers) == 1


def test_the_times_of_a_reload_are_those_of_one_engine():
    before = "# HELP\nflywheel_reload_pause_seconds_sum 1.0\nflywheel_reload_pause_seconds_count 2.0\n"
    after = (
        "flywheel_reload_pause_seconds_sum 1.5\nflywheel_reload_pause_seconds_count 4.0\n"
        'flywheel_reload_proof_seconds_bucket{le="1"} 2.0\n'
        "flywheel_reload_proof_seconds_sum 0.6\nflywheel_reload_proof_seconds_count 2.0\n"
    )
    assert seconds_of_each(read_reloads(before), read_reloads(after)) == {"pause": 0.25, "proof": 0.3}


def _failed_target(report: dict[str, object]) -> dict[str, object]:
    (row,) = (row for row in targets(report, 64, "100+64", "1024+256") if str(row["what"]).startswith(FAILED))
    return row


def test_a_turn_that_flywheel_fails_wholly_is_reported_and_misses_the_target(monkeypatch):
    async def fails(gateway: Gateway, _seconds: float) -> Figures:
        raise LoadFailed(gateway.name, "every chat failed")

    monkeypatch.setattr(front_door, "_ready", lambda *_: [Gateway("flywheel", 1)])
    args = argparse.Namespace(turns=2, seconds=0.1, only=("flywheel",))
    size = front_door.run_size(args, (100, 64), {"chats_1": fails})
    assert size["turns_counted"] == 0
    assert size["turns_dropped"] == [{"gateway": "flywheel", "why": "every chat failed"}] * 2
    assert (_failed_target({"100+64": size})["figure"], _failed_target({"100+64": size})["holds"]) == (2, False)


@pytest.mark.parametrize("loads", [{"chats_1": load.CHATS["chats_1"]}, {}], ids=["load", "idle"])
def test_turns_of_a_gateway_that_has_died_are_dropped_and_reported(loads, monkeypatch):
    class Dead(Gateway):
        def cpu_s(self) -> float:
            raise ProcessLookupError(1)

    monkeypatch.setattr(front_door, "_ready", lambda *_: [Dead("trinity", free_port(), psutil.Process())])
    args = argparse.Namespace(turns=2, seconds=0.1, only=("trinity",))
    size = front_door.run_size(args, (100, 64), loads)
    assert [turn["gateway"] for turn in size["turns_dropped"]] == ["trinity"] * 2


def test_a_chat_that_the_gateway_refuses_to_accept_is_a_failed_chat():
    """It answers the first chats and then closes its connection and its port."""

    async def measure() -> Figures:
        answered = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal answered
            while answered < 5:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                answered += 1
            server.close()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        return await load.measure_chats(Gateway("trinity", server.sockets[0].getsockname()[1]), 1, seconds=0.3)

    figures = asyncio.run(measure())
    assert figures["chats"] == 4 and figures["failed"] > 1


def test_a_load_lasts_as_long_for_a_fast_gateway(engine):
    url, _ = engine
    gateway = Gateway("flywheel", int(url.rpartition(":")[2]))
    for in_flight, measure in ((1, load.CHATS["chats_1"]), (32, load.CHATS["chats_32"])):
        figures = asyncio.run(measure(gateway, 0.5))
        assert figures["seconds"] >= 0.5
        assert figures["chats"] > in_flight
        assert figures["chats_per_s"] == pytest.approx(figures["chats"] / figures["seconds"])


def test_a_load_of_a_number_of_chats_sends_them_all(engine):
    url, _ = engine
    gateway = Gateway("flywheel", int(url.rpartition(":")[2]))
    assert asyncio.run(load.measure_chats(gateway, 4, chats=42))["chats"] == 42


def test_a_turn_that_a_peer_fails_does_not_miss_our_target():
    size = {"flywheel": {"chats_1": {"failed": 0}}, "turns_dropped": [{"gateway": "trinity", "why": "slow"}]}
    assert _failed_target({"100+64": size})["holds"] is True


def test_the_peak_of_scoring_excludes_memory_that_was_used_before(monkeypatch):
    monkeypatch.setattr(peak, "VOCABULARY", 1000)
    del_me = b"x" * (400 * 2**20)
    assert len(del_me) > 0
    del del_me
    assert peak.measure(0.3, lambda _layer, hidden_KD, _actions: hidden_KD.sum(-1), update=False) < 0.1


def test_figures_over_seeds_name_the_least_merged_share_and_count_failed_evaluations():
    def run(merged: float | None, failed: int) -> dict[str, object]:
        sides = {side: {"version": 0, "n": 9, "failed": failed, "reward": 0.5} for side in ("before", "after")}
        ends = {"reward_first": 0.1, "reward_last": 0.2}
        return {**sides, **ends, "failures": {"agent": 1}, "rows_quarantined": 0, "merged": merged}

    found = example_seeds.summarise([run(0.9, 0), run(0.8, 3), run(None, 0)])
    assert "merged" not in found
    assert (found["merged_least"], found["evaluations_failed"], found["failures"]) == (0.8, 6, 3)


@pytest.mark.parametrize(("crossed", "seconds"), [({"a"}, 3.0), (set(), 4.5)])
def test_the_first_token_of_a_version_may_belong_to_a_stream_that_goes_on(crossed, seconds):
    """The stream paused from 9 to 13, of which the row came at 10; the first chat of the version answered at 14.5."""
    stream = Stream(msg_id="a", event_times=[1.0, 4.0, 9.0, 13.0, 13.2])
    late = [LateChat(1, 0.1, 9.5), LateChat(2, 0.3, 14.5)]
    turn = Turn([stream, Stream(msg_id="b")], late, began_at=9.8, published=2, row_at=10.0)
    assert row_to_first_token(turn, crossed) == seconds
    assert row_to_first_chat(turn) == 4.5
