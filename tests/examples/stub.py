"""A server with OpenAI's chat completions whose answers a test writes. It keeps the requests."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# a request's body → the assistant's message; {"error": text} refuses the chat with 400
Answer = Callable[[dict[str, Any]], dict[str, Any]]


def call(name: str, number: int, **arguments: Any) -> dict[str, Any]:
    """A message with one tool call."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": f"call-{number}", "type": "function", "function": function}]}


def at_once(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """One message with the calls of several."""
    return {"content": None, "tool_calls": [one for message in calls for one in message["tool_calls"]]}


@contextlib.contextmanager
def stub(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The server's base URL, and the bodies that it gets."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Nothing is printed."""

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            message = {"role": "assistant", **answer(body)}
            stream, refused = bool(body.get("stream")), "error" in message
            said = {"error": {"message": message["error"]}} if refused else _completion(message)
            data = _stream(message) if stream and not refused else json.dumps(said).encode()
            self.send_response(400 if refused else 200)
            self.send_header("Content-Type", "text/event-stream" if stream and not refused else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", bodies
        finally:
            server.shutdown()
            thread.join()


def _completion(message: dict[str, Any]) -> dict[str, Any]:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    found = {"id": "c", "object": "chat.completion", "created": 1, "model": "agent"}
    return {**found, "choices": [choice], "usage": usage}


def _stream(message: dict[str, Any]) -> bytes:
    calls = [{**one, "index": number} for number, one in enumerate(message.get("tool_calls", []))]
    delta = {**message, **({"tool_calls": calls} if calls else {})}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "agent"}
    first = {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    last = {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    return "".join(f"data: {json.dumps(one)}\n\n" for one in (first, last)).encode() + b"data: [DONE]\n\n"


def longest_prompt(bodies: list[dict[str, Any]]) -> int:
    """Characters of the longest prompt, tools included; Qwen's tokenizer makes less than a token of two."""
    return max(len(json.dumps([body["messages"], body.get("tools", [])])) for body in bodies)
