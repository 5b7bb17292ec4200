"""A scripted teacher behind real HTTP: answers like vLLM, with a function that a test may replace."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
Answer = Callable[[str, Body], tuple[int, Any]]


def as_vllm(tokenizer: Any) -> Answer:
    """vLLM's status and body for a path and a body; log p of a token is −id/100."""

    def answer(path: str, body: Body) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "big"}]}
        if path == "/detokenize":
            return 200, {"prompt": tokenizer.decode(body["tokens"])}
        entries = [None, *({str(token): {"logprob": -token / 100}} for token in body["prompt"][1:])]
        return 200, {"choices": [{"prompt_logprobs": entries}]}

    return answer


class ScriptedTeacher:
    """`answer` makes the answers."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[tuple[str, Body, str | None]] = []
        self.answer = answer
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                outer.asked.append((self.path, body, self.headers.get("Authorization")))
                status, said = outer.answer(self.path, body)
                data = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a caller that left
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
