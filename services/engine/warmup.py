"""Warms an engine up before it gets traffic: sends requests that make it compile everything it will need."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from services.engine.adapters import WarmUpAdapters
from services.engine.gate import CLOSE_PATH, OPEN_PATH, WARMUP_HEADER
from shared.errors import EngineError


class WarmingEngine:
    """Blocking calls to an engine on this machine whose gate is still closed. A context manager.

    A call lasts until the engine answers or its process ends: engine.start_timeout_s bounds all calls together.
    """

    def __init__(
        self, url: str, model: str, token: str, label: str = "default", adapters: WarmUpAdapters | None = None
    ) -> None:
        """label: of the weights, which the engine is to report. adapters: None: versions are not adapters."""
        self._model = model
        self._adapters = adapters
        self._label = label
        # vLLM closes idle connections after seconds, and compiling takes longer: each call opens a new one
        limits = httpx.Limits(max_keepalive_connections=0)
        headers = {WARMUP_HEADER: token}
        self._http = httpx.Client(base_url=url, headers=headers, limits=limits, trust_env=False)

    def __enter__(self) -> WarmingEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def is_healthy(self) -> bool:
        """Whether vLLM answers on /health."""
        try:
            self._call("GET", "/health", timeout_s=2.0)
        except EngineError:
            return False
        return True

    def warm_up_and_open(self) -> None:
        """Warm the engine up, label its weights, and open it to all callers. Raises EngineError."""
        self.warm_up()
        self.write_label()
        self.open_gate()

    def warm_up(self) -> None:
        """Sample alone and concurrently, score tokens, pause under load and resume. Raises EngineError."""
        with ThreadPoolExecutor(16) as pool:
            self._chat(0)
            list(pool.map(self._chat, range(16)))
            under_load = [pool.submit(self._chat, n) for n in range(8)]
            self._call("POST", "/pause?mode=keep")  # the first pause under load compiles, too
            self._call("POST", "/resume")
            for chat in under_load:
                chat.result()
        score = {"model": self._model, "prompt": [1, 2, 3], "max_tokens": 1, "prompt_logprobs": 0}
        self._call("POST", "/v1/completions", score)
        if self._adapters is not None:
            self._warm_up_adapters(self._adapters)
        self._call("POST", "/reset_prefix_cache")

    def _warm_up_adapters(self, adapters: WarmUpAdapters) -> None:
        """Load the adapters, and sample from two of them and the base concurrently."""
        names = [f"warm-up-{number}" for number in range(adapters.count)]
        for name in names:
            self._call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(adapters.folder)})
        with ThreadPoolExecutor(12) as pool:
            self._chat(0, names[0])
            list(pool.map(self._chat, range(12), [*names[:2], self._model] * 4))
        if adapters.keeps_last:  # vLLM numbers adapters from 1
            self._call("POST", "/collective_rpc", {"method": "pin_lora", "args": [adapters.count]})
        for name in names:
            self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def write_label(self) -> None:
        """Send the engine its label; engines without labels ignore it. Raises EngineError."""
        self._call("POST", "/update_weight_version", {"new_version": self._label}, missing_ok=True)

    def open_gate(self) -> None:
        """Open the engine to all callers."""
        self._call("POST", OPEN_PATH)

    def close_gate(self, timeout_s: float) -> None:
        """Close the engine to all callers, and wait for the end of requests in flight. Raises EngineError."""
        self._call("POST", CLOSE_PATH, timeout_s=timeout_s)

    def _chat(self, number: int, model: str | None = None) -> None:
        body = {
            "model": model or self._model,
            "messages": [{"role": "user", "content": f"warm-up {number} " * (1 + number % 4)}],
            "max_tokens": 12,
            "temperature": 0.7 if number % 2 else 1.0,
            "top_p": 0.9 if number % 4 == 1 else 1.0,
            "logprobs": True,
            "return_token_ids": True,
        }
        self._call("POST", "/v1/chat/completions", body)

    def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_s: float | None = None,
        *,
        missing_ok: bool = False,
    ) -> None:
        try:
            reply = self._http.request(method, path, json=body, timeout=timeout_s)
        except httpx.HTTPError as exc:
            raise EngineError(f"{method} {path}: {exc}") from exc
        if not reply.is_success and not (missing_ok and reply.status_code == 404):
            raise EngineError(f"{method} {path} answered {reply.status_code}: {reply.text[:500]}")
