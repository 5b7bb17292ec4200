"""Administration of one engine over HTTP: health, pause, load, resume, label, and logprobs of given tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec

from explorer_service.engines.http import CONNECT_TIMEOUT_S, KEEPALIVE_S
from explorer_service.errors import NO_JSON, EngineRefused, EngineTimeout, EngineUnavailable
from shared.clock import since_boot_s
from shared.errors import EngineError, VersionError, VersionMissing

HEALTH_TIMEOUT_S = 5.0
SUSPENDED_S = 1.0  # a process whose timer is so late stood still
TOKEN_HEADER = "X-Flywheel-Engine-Token"  # the same as in services/engine/gate.py
STAGE_PATH, RESTART_PATH = "/flywheel/stage", "/flywheel/restart"  # the same as in services/engine/gate.py
IDENTITY_PATH = "/flywheel/identity"  # likewise
MAX_ANSWER_BYTES = 64 * 1024 * 1024
MAX_IDENTITY = 300  # characters
_NO_ROUTE = (404, 405)


@contextmanager
def _if_supported() -> Iterator[None]:
    """Ignore the refusal of a server that does not have the route."""
    try:
        yield
    except EngineRefused as error:
        if error.status not in _NO_ROUTE:
            raise


def open_client() -> httpx.AsyncClient:
    """Open the HTTP client for the administration of all engines."""
    limits = httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_S)
    return httpx.AsyncClient(limits=limits, trust_env=False)


class EngineAdmin:
    """Requests of the explorer to a vLLM server besides chat. Every method raises EngineError."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        url: str,
        model: str,
        timeout_s: float,
        token: str | None = None,
        load_timeout_s: float | None = None,
    ) -> None:
        """token: required by engines of `flywheel engine`. load_timeout_s: for staging and loading a version."""
        self._client = client
        self.url = url
        self._model = model
        self._timeout_s, self._load_timeout_s = timeout_s, load_timeout_s
        self._headers = {"Content-Type": "application/json"} | ({} if token is None else {TOKEN_HEADER: token})

    async def check_health(self) -> None:
        """Raise EngineUnavailable unless the engine answers 200 on /health."""
        asked_at = since_boot_s()
        try:
            await self._require_health()
        except EngineTimeout:
            if since_boot_s() < asked_at + HEALTH_TIMEOUT_S + SUSPENDED_S:
                raise
            await self._require_health()  # this explorer was suspended, and may not have read the answer

    async def _require_health(self) -> None:
        try:
            await self._call("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
        except EngineRefused as exc:  # it is warming up, or its core is dead
            raise EngineUnavailable(str(exc)) from exc

    async def read_identity(self) -> str | None:
        """Return the engine's own name, which is the same at each of its urls; None: it is no `flywheel engine`."""
        try:
            identity = (await self._call("GET", IDENTITY_PATH, timeout_s=HEALTH_TIMEOUT_S)).get("identity")
        except EngineRefused as error:
            if error.status not in (*_NO_ROUTE, 200):  # 200: a page, from a server that answers every path
                raise
            return None
        return identity[:MAX_IDENTITY] if isinstance(identity, str) and identity else None

    async def stage(self, version: int, manifest_sha256: str | None, in_use: Collection[int] = ()) -> Path | None:
        """Have the engine's machine copy or rebuild a version on its disk, while the engine serves.

        in_use: versions that the engine may read again; their staged files are kept. Returns the folder there to load
        from; None: the server does not stage, like other vLLM servers. Raises VersionError if the version is unsound,
        VersionMissing if the machine does not see it or a version that it is built from.
        """
        try:
            body = {"version": version, "manifest_sha256": manifest_sha256, "in_use": sorted(in_use)}
            reply = await self._call("POST", STAGE_PATH, body, self._load_timeout_s)
        except EngineRefused as exc:
            if exc.status in _NO_ROUTE:
                return None
            if exc.status == 409:
                raise VersionMissing(str(exc)) from exc
            if exc.status == 422:
                raise VersionError(str(exc)) from exc
            raise
        path = reply.get("path")
        if not isinstance(path, str):
            raise EngineError(f"engine {self.url}: {STAGE_PATH} returned no path")
        return Path(path)

    async def pause(self, mode: str) -> None:
        """Stop sampling. mode: `keep` freezes running requests, `wait` finishes them first. May be repeated."""
        await self._call("POST", f"/pause?mode={mode}", timeout_s=self._load_timeout_s if mode == "wait" else None)

    async def reload_weights(self, folder: Path) -> None:
        """Read all weights from a version's folder, in place. A 200 does not prove the load: score a probe."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._call("POST", "/collective_rpc", body, self._load_timeout_s)

    async def reset_prefix_cache(self) -> None:
        """Delete KV that older weights computed, which reload_weights does not."""
        await self._call("POST", "/reset_prefix_cache")

    async def resume(self) -> None:
        """Continue sampling, if paused. A server without developer mode has neither this route nor /pause."""
        with _if_supported():
            await self._call("POST", "/resume")

    async def list_models(self) -> dict[str, str]:
        """Return the names of the engine's models, each with the folder of its adapter or of the base."""
        cards = (await self._call("GET", "/v1/models")).get("data")
        try:
            return {str(card["id"]): str(card.get("root")) for card in cards or ()}
        except (KeyError, TypeError, AttributeError) as exc:
            raise EngineError(f"engine {self.url}: /v1/models did not return a list of models") from exc

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load the adapter in a folder under a name. A 200 does not prove the load: score a probe."""
        body = {"lora_name": name, "lora_path": str(folder)}
        await self._request("POST", "/v1/load_lora_adapter", body, self._load_timeout_s)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter, if it is loaded. Requests in flight continue."""
        with _if_supported():
            await self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def read_label(self, *, may_load: bool = False) -> str | None:
        """Return the last label of `write_label`; None: the server does not support labels.

        may_load: the engine may be loading a version; it answers after that.
        """
        try:
            info = await self._call("GET", "/weight_info", timeout_s=self._load_timeout_s if may_load else None)
        except EngineRefused as error:
            if error.status in _NO_ROUTE:
                return None
            raise
        return str(info.get("weight_version"))

    async def write_label(self, label: str) -> None:
        """Store the label of the engine's weights. Has no effect on a server without labels."""
        with _if_supported():
            await self._call("POST", "/update_weight_version", {"new_version": label})

    async def restart(self) -> None:
        """Have `flywheel engine` restart the engine. Raises EngineRefused if it was started by other means."""
        with suppress(EngineUnavailable):  # it ends before it answers
            await self._call("POST", RESTART_PATH)

    async def tokenize(self, messages: list[Any], tools: Any, *, ends_with_reply: bool) -> list[int]:
        """Return the tokens of messages by the chat template, with the prompt for a reply unless `ends_with_reply`."""
        body = {"model": self._model, "messages": messages, "add_generation_prompt": not ends_with_reply}
        reply = await self._call("POST", "/tokenize", {**body, "tools": tools} if tools else body)
        try:
            return [int(token) for token in reply["tokens"]]
        except (KeyError, TypeError, ValueError) as exc:
            raise EngineError(f"engine {self.url} returned no tokens for a conversation") from exc

    async def score(self, sequences: list[list[int]], model: str | None = None) -> list[list[float]]:
        """Return log p of each token after the first of each sequence, computed by the current weights: [N][T-1].

        model: the name of an adapter; None: the configured name.
        """
        body = {
            "model": model or self._model,
            "prompt": sequences,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }
        reply = await self._call("POST", "/v1/completions", body)
        try:
            return [_logprobs(*of) for of in zip(sequences, reply["choices"], strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as exc:
            raise EngineError(
                f"engine {self.url} returned no prompt_logprobs; is it a vLLM server of 0.32 or later?"
            ) from exc

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Return the answer's JSON object; an empty one for other JSON."""
        content = await self._request(method, path, body, timeout_s)
        try:
            decoded = msgspec.json.decode(content) if content else {}
        except NO_JSON as exc:
            raise EngineRefused(f"engine {self.url}: {path} returned a body that is not JSON", 200) from exc
        return decoded if isinstance(decoded, dict) else {}

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> bytes:
        data = None if body is None else msgspec.json.encode(body)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                status, content = await self._exchange(method, path, data)
        except TimeoutError as exc:
            raise EngineTimeout(f"engine {self.url}: {path} has not answered within {limit_s:g} s") from exc
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise EngineUnavailable(f"engine {self.url}: {path} failed ({str(exc) or type(exc).__name__})") from exc
        if status != 200:
            text = content[:300].decode(errors="replace")
            raise EngineRefused(f"engine {self.url}: {path} answered {status}: {text}", status)
        return content

    async def _exchange(self, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        """Return status and body. The caller limits the time: each received part resets httpx's own timeout."""
        content, timeout = bytearray(), httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        async with self._client.stream(
            method, self.url + path, content=data, headers=self._headers, timeout=timeout
        ) as reply:
            async for part in reply.aiter_bytes():
                content += part
                if len(content) > MAX_ANSWER_BYTES:
                    raise EngineUnavailable(f"engine {self.url}: {path} answered more than {MAX_ANSWER_BYTES} bytes")
        return reply.status_code, bytes(content)


def _logprobs(token_ids: list[int], choice: dict[str, Any]) -> list[float]:
    """Return log p of each token after the first: [T-1]. Raises KeyError, IndexError, TypeError, ValueError."""
    entries = choice["prompt_logprobs"][1:]
    return [float(entry[str(token)]["logprob"]) for token, entry in zip(token_ids[1:], entries, strict=True)]
