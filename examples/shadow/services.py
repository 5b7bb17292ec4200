"""The desk's surroundings as HTTP servers on this machine's loopback: the office and production's strong model."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, unquote

from examples.loopback import Pages, listening
from examples.shadow.world import DUE, RECORDS, REFUND, REFUNDED, Office, complaint_of

MAX_BODY_BYTES = 1 << 20
# (method, path, body) → (status, content type, text)
Answerer = Callable[[str, str, bytes], tuple[int, str, str]]


@contextlib.contextmanager
def serve(answer: Answerer, port: int = 0) -> Iterator[str]:
    """Serve a function while the block runs, one request at a time. Yields its URL."""
    lock = threading.Lock()

    class Handler(Pages):
        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            body = self.read_body(MAX_BODY_BYTES)
            if body is None:
                self.send(413, "too long, or of unknown length", "text/plain")
            else:
                self._answer(body)

        def _answer(self, body: bytes) -> None:
            with lock:
                status, kind, text = answer(self.command, self.path, body)
            self.send(status, text, kind)

    with listening(Handler, port) as url:
        yield url


def office(desk: Office) -> Answerer:
    """Return the office's handler: GET /orders/ORDER, and POST /refunds with order=ORDER. It counts every call."""

    def answer(method: str, path: str, body: bytes) -> tuple[int, str, str]:
        if method == "GET" and path.startswith("/orders/"):
            return 200, "text/plain", desk.look_up(unquote(path.removeprefix("/orders/")))
        if method == "POST" and path == "/refunds":
            order = parse_qs(body.decode("utf-8", "replace")).get("order", [""])[0]
            return 200, "text/plain", desk.refund(order)
        return 404, "text/plain", "GET /orders/ORDER or POST /refunds"

    return answer


class TrialOffices:
    """A separate office per ticket, at /TICKET, for evaluations: its refunds are counted apart."""

    def __init__(self) -> None:
        self.desks: dict[str, Office] = {}

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, str, str]:
        """Handle a request with the office that the first part of the path names."""
        name, _, rest = path.removeprefix("/").partition("/")
        return office(self.desks.setdefault(unquote(name), Office()))(method, f"/{rest}", body)


def strong_model(method: str, path: str, body: bytes) -> tuple[int, str, str]:
    """Production's model, a script with the interface of OpenAI's chat completions. It always does what is due."""
    if (method, path) != ("POST", "/v1/chat/completions"):
        return 404, "application/json", json.dumps({"error": {"message": f"no {method} {path}"}})
    messages = json.loads(body)["messages"]
    message, finish = decide(messages), "stop"
    if "tool_calls" in message:
        finish = "tool_calls"
    reply = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "strong",
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }
    return 200, "application/json", json.dumps(reply)


def decide(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the strong model's next message."""
    said = next(str(message["content"]) for message in messages if message["role"] == "user")
    order = said.split()[1]
    results = [str(message["content"]) for message in messages if message["role"] == "tool"]
    if not results:
        return _call("lookup", order)
    if results[-1] == REFUNDED:
        return {"role": "assistant", "content": REFUNDED}
    state = next((name for name, record in RECORDS.items() if record == results[-1]), "")
    due = DUE.get((state, complaint_of(said) or ""), "explain")
    return _call(REFUND, order) if due == REFUND else {"role": "assistant", "content": due}


def _call(name: str, order: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps({"order": order})}
    call = {"id": f"call_{uuid.uuid4().hex[:12]}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}
