"""Warming an engine up: the requests that make it compile everything it will need, before it takes traffic."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from services.engine.gate import OPEN_PATH, TOKEN_HEADER
from shared.errors import EngineError

REQUEST_TIMEOUT_S = 300.0


class WarmingEngine:
    """Blocking calls to an engine whose gate is still closed."""

    def __init__(self, url: str, model: str, token: str) -> None:
        self._url = url
        self._model = model
        self._token = token

    def is_healthy(self) -> bool:
        """Whether vLLM answers on /health."""
        try:
            self._call("GET", "/health", timeout_s=2.0)
        except EngineError:
            return False
        return True

    def warm_up(self) -> None:
        """Sample alone and side by side, score tokens, pause under load and resume. Raises EngineError."""
        with ThreadPoolExecutor(16) as pool:
            self._chat(0)
            list(pool.map(self._chat, range(16)))
            under_load = [pool.submit(self._chat, n) for n in range(8)]
            self._call("POST", "/pause?mode=keep")  # the first pause under load compiles too
            self._call("POST", "/resume")
            for chat in under_load:
                chat.result()
        score = {"model": self._model, "prompt": [1, 2, 3], "max_tokens": 1, "prompt_logprobs": 0}
        self._call("POST", "/v1/completions", score)
        self._call("POST", "/reset_prefix_cache")

    def open_gate(self) -> None:
        """From now on the engine serves everyone."""
        self._call("POST", OPEN_PATH)

    def _chat(self, number: int) -> None:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": f"warm-up {number} " * (1 + number % 4)}],
            "max_tokens": 12,
            "temperature": 0.7 if number % 2 else 1.0,
            "top_p": 0.9 if number % 4 == 1 else 1.0,
            "logprobs": True,
            "return_token_ids": True,
        }
        self._call("POST", "/v1/chat/completions", body)

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> None:
        request = urllib.request.Request(
            self._url + path,
            method=method,
            data=json.dumps(body).encode() if body is not None else None,
            headers={TOKEN_HEADER: self._token, "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                reply.read()
        except urllib.error.HTTPError as exc:
            raise EngineError(f"{method} {path} answered {exc.code}: {exc.read(500).decode(errors='replace')}") from exc
        except OSError as exc:
            raise EngineError(f"{method} {path}: {exc}") from exc
