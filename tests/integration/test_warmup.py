"""The warm-up and the gate, over real HTTP."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
import uvicorn

from services.engine.adapters import WarmUpAdapters
from services.engine.gate import (
    ADMIN_HEADER,
    ADMIN_VARIABLE,
    IDENTITY_VARIABLE,
    OPEN_ROUTES,
    WARMUP_VARIABLE,
    EngineGate,
)
from services.engine.warmup import WarmingEngine
from shared.errors import EngineError
from tests.support.servers import free_port, wait_until

SLOW_S = 120.0  # longest time of an answer


class Engine:
    """An ASGI app in the place of vLLM's behind the gate, on a free port. Answers 200, or what `answers` names."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.answers_completions = threading.Event()
        self.answers_completions.set()
        self.answers: dict[str, tuple[int, bytes]] = {}
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        app = EngineGate(self._answer)
        self._server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)

    async def _answer(self, scope, receive, send) -> None:
        self.paths.append(scope["path"])
        if scope["path"] == "/v1/completions":
            await asyncio.to_thread(self.answers_completions.wait, SLOW_S)
        status, body = self.answers.get(scope["path"], (200, b"{}"))
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(120)


@pytest.fixture
def engine(monkeypatch) -> Iterator[Engine]:
    monkeypatch.setenv(WARMUP_VARIABLE, "secret")
    monkeypatch.setenv(ADMIN_VARIABLE, "obey")
    engine = Engine()
    yield engine
    engine.stop()


def test_only_the_warm_up_passes_the_gate_until_it_opens_it(engine):
    with WarmingEngine(engine.url, "agent", "secret") as warming, WarmingEngine(engine.url, "agent", "guess") as other:
        assert httpx.get(engine.url + "/health", timeout=SLOW_S).status_code == 503
        assert not other.is_healthy()
        wait_until(warming.is_healthy)
        with pytest.raises(EngineError, match="answered 503"):
            other.open_gate()
        warming.open_gate()
    assert httpx.get(engine.url + "/health", timeout=SLOW_S).status_code == 200


def test_an_engine_that_stops_refuses_all_callers_and_only_the_process_that_started_it_closes_it(engine):
    with WarmingEngine(engine.url, "agent", "secret") as warming, WarmingEngine(engine.url, "agent", "guess") as other:
        warming.open_gate()
        with pytest.raises(EngineError, match="answered 403"):
            other.close_gate(SLOW_S)
        assert httpx.get(engine.url + "/health", timeout=SLOW_S).status_code == 200
        warming.close_gate(SLOW_S)
    for headers in ({}, {ADMIN_HEADER: "obey"}):
        assert httpx.get(engine.url + "/health", headers=headers, timeout=SLOW_S).status_code == 503


def test_an_engine_that_stops_is_closed_at_once_and_waits_for_what_is_in_flight(engine):
    with WarmingEngine(engine.url, "agent", "secret") as warming, ThreadPoolExecutor(2) as pool:
        warming.open_gate()
        engine.answers_completions.clear()
        chat = pool.submit(httpx.post, engine.url + "/v1/completions", timeout=SLOW_S)
        wait_until(lambda: "/v1/completions" in engine.paths)
        closing = pool.submit(warming.close_gate, SLOW_S)
        wait_until(lambda: httpx.get(engine.url + "/health", timeout=SLOW_S).status_code == 503)
        assert not closing.done()
        resuming = {ADMIN_HEADER: "obey"}
        assert httpx.post(engine.url + "/resume", headers=resuming, timeout=SLOW_S).status_code == 200, "a reload ends"
        assert httpx.get(engine.url + "/health", headers=resuming, timeout=SLOW_S).status_code == 503
        assert httpx.post(engine.url + "/resume", timeout=SLOW_S).status_code == 503
        engine.answers_completions.set()
        assert chat.result().status_code == 200
        closing.result()


def test_the_warm_up_samples_pauses_under_load_and_scores(engine):
    with WarmingEngine(engine.url, "agent", "secret") as warming:
        warming.warm_up()
    assert engine.paths.count("/v1/chat/completions") == 25
    assert [path for path in engine.paths if "chat" not in path] == [
        "/pause",
        "/resume",
        "/v1/completions",
        "/reset_prefix_cache",
    ]


@pytest.mark.parametrize("status", [200, 404])
def test_an_engine_is_told_which_weights_it_was_started_with_if_it_keeps_labels(engine, status):
    engine.answers["/update_weight_version"] = (status, b"{}")
    with WarmingEngine(engine.url, "agent", "secret", "3:9f86d081884c7d65") as warming:
        warming.write_label()
    assert engine.paths == ["/update_weight_version"]


def test_an_answer_that_is_an_error_is_named_with_its_status_and_its_text(engine):
    engine.answers["/v1/completions"] = (400, b"no such model")
    with (
        WarmingEngine(engine.url, "agent", "secret") as warming,
        pytest.raises(EngineError, match="POST /v1/completions answered 400: no such model"),
    ):
        warming.warm_up()


def test_an_engine_that_does_not_listen_yet_is_not_healthy():
    with WarmingEngine(f"http://127.0.0.1:{free_port()}", "agent", "secret") as warming:
        assert not warming.is_healthy()
        with pytest.raises(EngineError, match="POST /flywheel/open"):
            warming.open_gate()


def test_an_engine_tells_its_own_name_to_the_holder_of_its_token_alone(monkeypatch):
    monkeypatch.setenv(ADMIN_VARIABLE, "obey")
    monkeypatch.setenv(IDENTITY_VARIABLE, "machine-8101-e0")
    engine = Engine()
    url = engine.url + "/flywheel/identity"
    reply = httpx.get(url, headers={ADMIN_HEADER: "obey"}, timeout=SLOW_S)
    assert (reply.json(), engine.paths) == ({"identity": "machine-8101-e0"}, [])
    assert httpx.get(url, timeout=SLOW_S).status_code == 403
    engine.stop()


ADMINISTRATION = [
    "/abort_requests", "/collective_rpc", "/finish_weight_update", "/inference/v1/generate",
    "/init_weight_transfer_engine", "/invocations", "/pause", "/release_kv_cache_memory", "/reset_encoder_cache",
    "/reset_mm_cache", "/reset_prefix_cache", "/resume", "/scale_elastic_ep", "/shutdown_weight_transfer_engine",
    "/sleep", "/start_draft_weight_update", "/start_profile", "/start_weight_update", "/stop_profile",
    "/update_weight_version", "/update_weights", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/wake_up",
    "/weight_checker", "/pause/", "//pause", "/v1/../pause", "/PAUSE", "/not/known/yet",
]  # fmt: skip


@pytest.fixture
def warm_engine(engine) -> Engine:
    with WarmingEngine(engine.url, "agent", "secret") as warming:
        warming.open_gate()
    return engine


@pytest.mark.parametrize("token", [{}, {ADMIN_HEADER: "guess"}, {ADMIN_HEADER: ""}, {"x-flywheel-warmup": "secret"}])
def test_a_stranger_commands_no_engine_after_the_gate_has_opened(warm_engine, token):
    with httpx.Client(headers=token, timeout=SLOW_S) as client:
        for path in ADMINISTRATION:
            for method in ("POST", "GET", "PUT", "DELETE"):
                url = httpx.URL(warm_engine.url, raw_path=path.encode())
                assert client.request(method, url).status_code == 403, (method, path)
    assert not warm_engine.paths


def test_the_holder_of_the_token_commands_the_engine(warm_engine):
    for path in ADMINISTRATION:
        url = httpx.URL(warm_engine.url, raw_path=path.encode())
        for sent, status in (({}, 200), ({"json": {}}, 200), ({"data": {"a": "b"}}, 415)):
            assert httpx.post(url, headers={ADMIN_HEADER: "obey"}, timeout=SLOW_S, **sent).status_code == status


SAMPLES_OR_READS = {
    ("GET", "/health"), ("GET", "/metrics"), ("GET", "/version"), ("GET", "/v1/models"), ("POST", "/tokenize"),
    ("POST", "/detokenize"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/messages"),
    ("POST", "/v1/responses"),
}  # fmt: skip


def test_everyone_samples_but_a_web_page(warm_engine):
    assert OPEN_ROUTES == SAMPLES_OR_READS
    for method, path in SAMPLES_OR_READS:
        page, url = {"Origin": "https://evil.example"}, warm_engine.url + path
        assert httpx.request(method, url, timeout=SLOW_S).status_code == 200
        assert httpx.request(method, url, headers=page, timeout=SLOW_S).status_code == 403
        assert httpx.options(url, headers=page, timeout=SLOW_S).status_code == 403


def test_every_route_of_the_installed_vllm_but_those_that_sample_or_read_refuses_a_stranger(warm_engine):
    found = {
        path
        for file in Path(find_spec("vllm").submodule_search_locations[0], "entrypoints").rglob("*.py")
        for path in re.findall(r'router\.\w+\(\s*"(/[^"]*)"', file.read_text())
    }
    names = {path for _, path in SAMPLES_OR_READS}
    assert names - found <= {"/metrics"}  # mounted, not declared
    assert {"/pause", "/collective_rpc", "/sleep", "/update_weights", "/server_info"} <= found
    with httpx.Client(base_url=warm_engine.url, timeout=SLOW_S) as client:
        for path in sorted(found - names):
            for method in ("POST", "GET"):
                assert client.request(method, re.sub(r"{\w+}", "x", path)).status_code == 403, (method, path)
    assert not warm_engine.paths


def test_an_engine_that_loads_adapters_is_warmed_up_with_them_and_keeps_zeros_in_the_last_place(engine, tmp_path):
    adapters = WarmUpAdapters(tmp_path, count=3, keeps_last=True)
    with WarmingEngine(engine.url, "agent", "secret", adapters=adapters) as warming:
        warming.warm_up()
    loads = [path for path in engine.paths if "lora" in path or path == "/collective_rpc"]
    assert loads == ["/v1/load_lora_adapter"] * 3 + ["/collective_rpc"] + ["/v1/unload_lora_adapter"] * 3
