"""One engine's administration over HTTP: health, pause, reload, resume, and the logprobs of given tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from explorer_service.engines.connection import CONNECT_TIMEOUT_S, KEEPALIVE_S
from shared.errors import EngineError

HEALTH_TIMEOUT_S = 5.0


def open_session() -> aiohttp.ClientSession:
    """The session for the administration of all engines."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(connect=CONNECT_TIMEOUT_S),
    )


class EngineClient:
    """What the explorer asks of a vLLM server besides chat. Every method raises EngineError."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, timeout_s: float) -> None:
        self._session = session
        self.url = url
        self._model = model
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def check_health(self) -> None:
        """Return if the engine answers 200 on /health; raise EngineAway for anything else."""
        try:
            await self._call("GET", "/health", timeout=aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S))
        except EngineRefused as exc:  # warming up, or its core is dead
            raise EngineAway(str(exc)) from exc

    async def list_models(self) -> list[str]:
        """The names this engine answers to."""
        reply = await self._call("GET", "/v1/models", timeout=aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S))
        return [str(model.get("id")) for model in reply.get("data", [])]

    async def pause(self, mode: str) -> None:
        """Stop sampling. `keep` freezes what runs, `wait` finishes it first."""
        await self._call("POST", f"/pause?mode={mode}")

    async def reload_weights(self, folder: Path) -> None:
        """Read all weights from a version's folder, in place. (A 200 does not prove it: score a probe.)"""
        await self._call(
            "POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        )

    async def reset_prefix_cache(self) -> None:
        """Forget KV that older weights computed: reload_weights does not."""
        await self._call("POST", "/reset_prefix_cache")

    async def resume(self) -> None:
        """Sample again; harmless when not paused."""
        await self._call("POST", "/resume")

    async def tokenize(self, messages: list[Any], tools: Any, *, ends_with_reply: bool) -> list[int]:
        """The tokens that the model's chat template makes of messages: with a reply at their end, or ready for one."""
        body = {"model": self._model, "messages": messages, "add_generation_prompt": not ends_with_reply}
        reply = await self._call("POST", "/tokenize", {**body, "tools": tools} if tools else body)
        try:
            return [int(token) for token in reply["tokens"]]
        except (KeyError, TypeError, ValueError) as exc:
            raise EngineError(f"engine {self.url} gave no tokens for a conversation") from exc

    async def score(self, token_ids: list[int]) -> list[float]:
        """log p of each token after the first, as this engine computes it now: [T-1]."""
        body = {
            "model": self._model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }
        reply = await self._call("POST", "/v1/completions", body)
        try:
            entries = reply["choices"][0]["prompt_logprobs"][1:]
            return [float(entry[str(token)]["logprob"]) for token, entry in zip(token_ids[1:], entries, strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as exc:
            raise EngineError(
                f"engine {self.url} gave no prompt_logprobs; is it a vLLM server of 0.32 or later?"
            ) from exc

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: aiohttp.ClientTimeout | None = None
    ) -> dict[str, Any]:
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout or self._timeout
            ) as reply:
                content = await reply.read()
                if reply.status != 200:
                    text = content[:300].decode(errors="replace")
                    raise EngineRefused(f"engine {self.url}: {path} answered {reply.status}: {text}")
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise EngineAway(f"engine {self.url}: {path} failed ({exc or type(exc).__name__})") from exc
        try:
            decoded = msgspec.json.decode(content) if content else {}
        except msgspec.DecodeError as exc:
            raise EngineRefused(f"engine {self.url}: {path} answered something that is not JSON") from exc
        return decoded if isinstance(decoded, dict) else {}


class EngineAway(EngineError):
    """Nothing answers there, or it stopped answering."""


class EngineRefused(EngineError):
    """The engine answered, and not with what was asked."""
