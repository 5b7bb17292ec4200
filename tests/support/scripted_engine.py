"""A scripted engine behind real HTTP, for fast tests: answers like vLLM 0.32, samples as its script says.

Its "weights" are a version number, read from the folder that it loads. It reproduces a probe exactly if the folder's
manifest is that of the weights that it holds.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from aiohttp import web

from services.engine.stage import answer as stage_answer
from tests.support.script import Script
from tests.support.scripted_adapters import ScriptedAdapters
from tests.support.scripted_answers import bad_request, break_off, completion_choice, token_events, usage, write_events
from tests.support.scripted_identity import add_identity


class ScriptedEngine:
    """Runs in its own thread on a free loopback port."""

    def __init__(self, port: int = 0, script: Script | None = None) -> None:
        """port: 0 for any free one."""
        self.script = script or Script()
        self._port = port
        self._come_back()
        self._adapters = ScriptedAdapters(self.script)
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(120)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application(middlewares=[self._meet_faults])
        add_identity(app, self.script)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        for path in ("/pause", "/resume", "/reset_prefix_cache"):
            app.router.add_post(path, self._admin)
        app.router.add_get("/weight_info", self._read_label)
        app.router.add_post("/update_weight_version", self._write_label)
        app.router.add_post("/flywheel/restart", self._restart)
        app.router.add_post("/flywheel/stage", self._stage)
        app.router.add_post("/collective_rpc", self._reload)
        self._adapters.add_to(app)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._started.set()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    @web.middleware
    async def _meet_faults(self, request: web.Request, handler: Any) -> web.StreamResponse:
        script = self.script
        if happen := script.on_call.get(request.path):
            await asyncio.to_thread(happen)
        if request.path in script.deadly:
            script.deadly.discard(request.path)
            self.die()
        if script.dead:
            return break_off(request)
        while request.path in script.hung:  # noqa: ASYNC110 — a script is a plain object
            await asyncio.sleep(0.01)
        if request.path in script.refused:
            return web.json_response({"error": "a fault was put in"}, status=500)
        return await handler(request)  # type: ignore[no-any-return]

    def die(self) -> None:
        """The process dies, and its supervisor restarts it."""
        script = self.script
        script.dead, script.deaths, script.label, script.loaded = True, script.deaths + 1, "default", "start"
        script.adapters.clear()
        self._loop.call_soon_threadsafe(self._loop.call_later, script.dead_s, self._come_back)

    def start_on(self, folder: Path) -> None:
        """Start on a version, now and after each death, like `flywheel engine`."""
        self.script.starts_on = folder
        self._come_back()

    def _come_back(self) -> None:
        script = self.script
        script.dead = script.broken = script.paused = False
        if script.starts_on is not None:
            self._hold(script.starts_on)
            digest = hashlib.sha256((script.starts_on / "MANIFEST.json").read_bytes()).hexdigest()[:16]
            script.label = f"{int(script.starts_on.name[1:])}:{digest}"

    async def _restart(self, request: web.Request) -> web.StreamResponse:
        self.script.calls.append(request.path)
        self.die()
        return break_off(request)

    async def _stage(self, request: web.Request) -> web.StreamResponse:
        if self.script.stage is None:
            return web.Response(status=404)
        status, said = await asyncio.to_thread(stage_answer, self.script.stage, await request.read())
        return web.json_response(said, status=status)

    async def _read_label(self, _request: web.Request) -> web.Response:
        if not self.script.keeps_labels:
            return web.Response(status=404)
        return web.json_response({"weight_version": self.script.label})

    async def _write_label(self, request: web.Request) -> web.Response:
        if not self.script.keeps_labels:
            return web.Response(status=404)
        self.script.label = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.script.label})

    async def _admin(self, request: web.Request) -> web.Response:
        self.script.calls.append(request.path)
        self.script.pause_modes += request.query.getall("mode", [])
        if request.path != "/reset_prefix_cache":
            self.script.paused = request.path == "/pause"
        if request.path == "/resume" and self.script.loaded == "nothing":
            self.script.broken = True
        return web.json_response({})

    async def _reload(self, request: web.Request) -> web.Response:
        folder = Path((await request.json())["kwargs"]["weights_path"])
        self.script.calls.append(f"reload {folder.name}")
        began = time.monotonic()
        await asyncio.sleep(self.script.reload_s)
        self.script.reloads.append((began, time.monotonic()))
        while folder.name in self.script.hung_loads:
            self.script.loaded = "nothing"
            await asyncio.sleep(0.01)
        if folder.name in self.script.deadly_loads:
            self.die()
            return break_off(request)
        if folder.name in self.script.failed_loads:
            self.script.loaded = "nothing"
            return web.json_response({"error": "a fault was put in"}, status=500)
        self._hold(folder)
        return web.json_response({"results": [None]})

    def _hold(self, folder: Path) -> None:
        self.script.loaded = folder.name
        probe = json.loads((folder / "MANIFEST.json").read_text())["probe"]
        for one in probe.get("contrasts", []):
            self.script.probes[tuple(one["token_ids"])] = [*[0.0] * (len(one["token_ids"]) - 2), one["logprob"]]
        for one in probe["sequences"]:
            self.script.probes[tuple(one["token_ids"])] = one["logprobs"]

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "prompt_logprobs" in body and isinstance(body.get("prompt"), list):
            return self._score(body)
        if not body.get("prompt") or not isinstance(body["prompt"], str):
            return bad_request("prompt: field required")
        if body.get("stream") not in (None, True, False):
            return bad_request("stream: yes or no")
        if refusal := self._refuse_model(body):
            return refusal
        self.script.bodies.append(body)
        head = {"id": self._reply_id("cmpl-", request, body), "object": "text_completion"}
        reply = {**head, "choices": [completion_choice(self.script, body)]}
        return await write_events(request, [reply]) if body.get("stream") else web.json_response(reply)

    def _refuse_model(self, body: dict[str, Any]) -> web.Response | None:
        name = body.get("model") or "agent"
        if not isinstance(name, str):
            return bad_request("model: a string")
        if name not in self.script.models and name not in self.script.adapters:
            message = f"The model `{name}` does not exist."
            error = {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
            return web.json_response({"error": error}, status=404)
        return None

    def _reply_id(self, prefix: str, request: web.Request, body: dict[str, Any]) -> str:
        """As in vLLM: from the header, else the body's field, else random."""
        asked = request.headers.get("X-Request-Id") or body.get("request_id") or uuid.uuid4().hex
        return self.script.reply_id or f"{prefix}{asked}"

    def _score(self, body: dict[str, Any]) -> web.Response:
        script, model = self.script, body["model"]
        off = script.noise if script.wrong_probe_for.isdisjoint((script.loaded, model)) else 1.0
        choices = []
        for ids in body["prompt"]:
            known = self._adapters.logprobs(model, ids) or script.probes.get(tuple(ids), [-9.0] * (len(ids) - 1))
            entries = [{str(t): {"logprob": p + off}} for t, p in zip(ids[1:], known, strict=True)]
            choices.append({"index": len(choices), "prompt_logprobs": [None, *entries]})
        return web.json_response({"choices": choices})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        script = self.script
        script.bodies.append(body)
        if not isinstance(body.get("messages"), list):
            return bad_request("messages: field required")
        if not isinstance(body.get("temperature"), int | float | None):
            return bad_request("temperature: a number")
        if type(body.get("n") or 1) is not int or not 1 <= (body.get("n") or 1) <= 16:
            return bad_request("n: a small integer")
        if body.get("stream") not in (None, True, False):
            return bad_request("stream: yes or no")
        if refusal := self._refuse_model(body):
            return refusal
        if len(body["messages"]) > script.most_messages:
            return bad_request(script.too_long)
        if script.die_on_chat:
            return break_off(request)
        lives = script.deaths
        try:
            await asyncio.sleep(script.delay_s)
            while script.holds_chat(bool(body.get("stream"))) and script.deaths == lives:  # noqa: ASYNC110 — as above
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            script.aborted += 1
            raise
        if script.deaths != lives:
            return break_off(request)
        msg_id = self._reply_id("chatcmpl-", request, body)
        if body.get("stream"):
            return await self._stream(request, body, msg_id)
        choices = [self._choice(body, index) for index in range(body.get("n") or 1)]
        reply: dict[str, Any] = {
            "id": msg_id,
            "object": "chat.completion",
            "model": body["model"],
            "choices": choices,
            "usage": usage(len(script.prompt_ids), len(script.reply_ids)),
            "prompt_token_ids": script.prompt_ids if body.get("return_token_ids") else None,
            "something_new": {"kept": True},
        }
        return web.json_response(reply)

    def _choice(self, body: dict[str, Any], index: int) -> dict[str, Any]:
        script = self.script
        sampled = self._sampled(body)
        content = [{"token": f"t{t}", "logprob": p, "bytes": None, "top_logprobs": []} for t, p in sampled]
        return {
            "index": index,
            "message": {"role": "assistant", "content": f"answer {index} of {self._holding(body)}", **script.message},
            "logprobs": {"content": content} if body.get("logprobs") else None,
            "finish_reason": script.finish_reason,
            "token_ids": script.reply_ids if body.get("return_token_ids") else None,
        }

    def _sampled(self, body: dict[str, Any]) -> list[tuple[int, float]]:
        script = self.script
        logprobs = [self._told(body)] * len(script.reply_ids) if script.tells_weights else script.logprobs
        return list(zip(script.reply_ids, logprobs, strict=False))

    def _told(self, body: dict[str, Any]) -> float:
        """Minus the current version, times a step."""
        held = self._holding(body)
        return -float(held[1:7]) * self.script.told_step if held.startswith("v") else 0.0

    def _holding(self, body: dict[str, Any]) -> str:
        """The folder that answers: the adapter's, or that of the loaded weights."""
        folder = self.script.adapters.get(body.get("model") or "agent")
        return self.script.loaded if folder is None else Path(folder).name

    async def _stream(self, request: web.Request, body: dict[str, Any], msg_id: str) -> web.StreamResponse:
        script = self.script
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        head: dict[str, Any] = {"id": msg_id, "object": "chat.completion.chunk", "model": body["model"]}
        first = {**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}]}
        if body.get("return_token_ids"):
            first["prompt_token_ids"] = script.prompt_ids
        events, lives = [first, *token_events(script, self._sampled(body), body, head)], script.deaths
        for number, event in enumerate(events):
            while script.holds_event(number, len(events)) and script.deaths == lives:  # noqa: ASYNC110 — as above
                await asyncio.sleep(0.002)
            if number == script.break_after_events or script.broken or script.deaths != lives:
                assert request.transport is not None
                request.transport.abort()
                return response
            if number and script.tells_weights:
                event["choices"][0]["logprobs"] = {"content": [{"token": "t", "logprob": self._told(body)}]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            script.events += 1
            await asyncio.sleep(script.gap_s if 0 < number < len(events) - 1 else 0.0)  # event 0: the first token
        await response.write(b"data: [DONE]\n\n")
        return response
