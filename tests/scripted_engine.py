"""A scripted engine behind real HTTP, for fast tests: answers like vLLM 0.32, samples what it is told to.

Its "weights" are a version number read from the folder it is told to load; a probe is reproduced exactly when the
folder's manifest says what the engine holds.
"""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web


@dataclass
class Script:
    """What the engine does; a test changes it while the engine runs."""

    healthy: bool = True
    reply_ids: list[int] = field(default_factory=lambda: [11, 12, 13])
    logprobs: list[float] = field(default_factory=lambda: [-0.5, -0.25, -0.125])
    prompt_ids: list[int] = field(default_factory=lambda: [1, 2, 3, 4])
    delay_s: float = 0.0
    reload_s: float = 0.0
    gap_s: float = 0.0
    break_after_events: int | None = None  # a stream breaks off
    wrong_probe_for: set[str] = field(default_factory=set)  # folders after whose load the logprobs are off
    die_on_chat: bool = False  # take the request and break off
    aborted: int = 0  # chats whose caller went away
    loaded: str = "start"
    probes: dict[tuple[int, ...], list[float]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    paused: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)


class ScriptedEngine:
    """Runs in a thread of its own on a free loopback port."""

    def __init__(self) -> None:
        self.script = Script()
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        for path in ("/pause", "/resume", "/reset_prefix_cache"):
            app.router.add_post(path, self._admin)
        app.router.add_post("/collective_rpc", self._reload)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._started.set()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.script.healthy else 503)

    async def _admin(self, request: web.Request) -> web.Response:
        self.script.calls.append(request.path)
        self.script.paused = request.path == "/pause"
        return web.json_response({})

    async def _reload(self, request: web.Request) -> web.Response:
        body = await request.json()
        folder = Path(body["kwargs"]["weights_path"])
        self.script.calls.append(f"reload {folder.name}")
        await asyncio.sleep(self.script.reload_s)
        self.script.loaded = folder.name
        manifest = json.loads((folder / "MANIFEST.json").read_text())
        for sequence in manifest["probe"]["sequences"]:
            self.script.probes[tuple(sequence["token_ids"])] = sequence["logprobs"]
        return web.json_response({"results": [None]})

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "prompt_logprobs" in body and isinstance(body.get("prompt"), list):
            return self._score(body)
        if not isinstance(body.get("prompt"), str):
            return _bad_request("prompt: field required")
        script = self.script
        script.bodies.append(body)
        choice = {
            "index": 0,
            "text": "answer",
            "logprobs": {"token_logprobs": script.logprobs} if body.get("logprobs") is not None else None,
            "finish_reason": "stop",
        }
        if body.get("return_token_ids"):
            choice |= {"token_ids": script.reply_ids, "prompt_token_ids": script.prompt_ids}
        name = "cmpl-" + request.headers["X-Request-Id"]
        return web.json_response({"id": name, "object": "text_completion", "choices": [choice]})

    def _score(self, body: dict[str, Any]) -> web.Response:
        ids = body["prompt"]
        off = 1.0 if self.script.loaded in self.script.wrong_probe_for else 0.0
        known = self.script.probes.get(tuple(ids), [-9.0] * (len(ids) - 1))
        entries = [None] + [{str(t): {"logprob": p + off}} for t, p in zip(ids[1:], known, strict=True)]
        return web.json_response({"choices": [{"index": 0, "prompt_logprobs": entries}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        script = self.script
        script.bodies.append(body)
        if not isinstance(body.get("messages"), list):
            return _bad_request("messages: field required")
        if not isinstance(body.get("temperature"), int | float | None):
            return _bad_request("temperature: a number")
        if type(body.get("n") or 1) is not int or not 1 <= (body.get("n") or 1) <= 16:
            return _bad_request("n: a small integer")
        if body.get("stream") not in (None, True, False):
            return _bad_request("stream: yes or no")
        if script.die_on_chat:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        try:
            await asyncio.sleep(script.delay_s)
            while script.paused:  # noqa: ASYNC110 — a script is a plain object
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            script.aborted += 1
            raise
        msg_id = "chatcmpl-" + request.headers["X-Request-Id"]
        if body.get("stream"):
            return await self._stream(request, body, msg_id)
        choices = [self._choice(body, index) for index in range(body.get("n") or 1)]
        reply: dict[str, Any] = {
            "id": msg_id,
            "object": "chat.completion",
            "model": body["model"],
            "choices": choices,
            "usage": {"prompt_tokens": len(script.prompt_ids), "completion_tokens": len(script.reply_ids)},
            "prompt_token_ids": script.prompt_ids if body.get("return_token_ids") else None,
            "something_new": {"kept": True},
        }
        return web.json_response(reply)

    def _choice(self, body: dict[str, Any], index: int) -> dict[str, Any]:
        script = self.script
        content = [{"token": f"t{t}", "logprob": p, "bytes": None, "top_logprobs": []} for t, p in self._sampled()]
        return {
            "index": index,
            "message": {"role": "assistant", "content": f"answer {index} of {script.loaded}"},
            "logprobs": {"content": content} if body.get("logprobs") else None,
            "finish_reason": "stop",
            "token_ids": script.reply_ids if body.get("return_token_ids") else None,
        }

    def _sampled(self) -> list[tuple[int, float]]:
        return list(zip(self.script.reply_ids, self.script.logprobs, strict=False))

    async def _stream(self, request: web.Request, body: dict[str, Any], msg_id: str) -> web.StreamResponse:
        script = self.script
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        head: dict[str, Any] = {"id": msg_id, "object": "chat.completion.chunk", "model": body["model"]}
        first = {**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}]}
        if body.get("return_token_ids"):
            first["prompt_token_ids"] = script.prompt_ids
        events = [first]
        for position, (token, logprob) in enumerate(self._sampled()):
            choice: dict[str, Any] = {"index": 0, "delta": {"content": f"t{token}"}, "logprobs": None}
            if body.get("logprobs"):
                choice["logprobs"] = {"content": [{"token": f"t{token}", "logprob": logprob}]}
            if body.get("return_token_ids"):
                choice["token_ids"] = [token]
            choice["finish_reason"] = "stop" if position == len(script.reply_ids) - 1 else None
            events.append({**head, "choices": [choice]})
        for number, event in enumerate(events):
            if number == script.break_after_events:
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(script.gap_s)
        await response.write(b"data: [DONE]\n\n")
        return response


def _bad_request(message: str) -> web.Response:
    error = {"message": message, "type": "Bad Request", "param": None, "code": 400}
    return web.json_response({"error": error}, status=400)
