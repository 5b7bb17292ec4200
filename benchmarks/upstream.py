"""A fake engine for benchmarks: answers every chat with the same pre-encoded reply, or streams it at a steady pace.

Real HTTP, no model: this measures the gateway in front of it. `benchmarks/front_door` runs it on its own core. Replies
contain token ids and logprobs in vLLM 0.32's format; only the id changes from one to the next.

    python -m benchmarks.upstream PORT PROMPT_TOKENS REPLY_TOKENS
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from typing import Any, cast

ID = b"chatcmpl-00000000000000000000000000000000"


def logprob(token: int) -> dict[str, Any]:
    return {
        "token": f" tok{token}",
        "logprob": -0.25 - (token % 50) / 37,
        "bytes": [32, 116, 111, 107],
        "top_logprobs": [],
    }


def whole_reply(n_prompt: int, n_reply: int) -> bytes:
    ids = [1000 + n * 7 % 30000 for n in range(n_reply)]
    body = {
        "id": ID.decode(),
        "object": "chat.completion",
        "created": 1_790_000_000,
        "model": "agent",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "".join(f" tok{t}" for t in ids), "refusal": None},
                "logprobs": {"content": [logprob(t) for t in ids]},
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": ids,
            }
        ],
        "usage": {"prompt_tokens": n_prompt, "total_tokens": n_prompt + n_reply, "completion_tokens": n_reply},
        "prompt_logprobs": None,
        "prompt_token_ids": list(range(1, n_prompt + 1)),
    }
    return json.dumps(body, separators=(",", ":")).encode()


def stream_events(n_prompt: int, n_reply: int) -> list[bytes]:
    head = {"id": ID.decode(), "object": "chat.completion.chunk", "created": 1_790_000_000, "model": "agent"}
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    events = [{**head, "choices": [first], "prompt_token_ids": list(range(1, n_prompt + 1))}]
    for n in range(n_reply):
        token = 1000 + n * 7 % 30000
        choice = {
            "index": 0,
            "delta": {"content": f" tok{token}"},
            "logprobs": {"content": [logprob(token)]},
            "finish_reason": "stop" if n == n_reply - 1 else None,
            "token_ids": [token],
        }
        events.append({**head, "choices": [choice]})
    return [b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n" for event in events]


class Upstream(asyncio.Protocol):
    """A minimal, fast HTTP/1.1 server protocol."""

    whole: bytes
    events: list[bytes]
    pace_s = 0.02

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has the methods, but is not a subclass

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        if head.startswith(b"post"):
            name = b"chatcmpl-" + uuid.uuid4().hex.encode()
            at = head.find(b"x-request-id:")
            if at >= 0 and len(given := head[at + 13 :].split(b"\r\n", 1)[0].strip()) == 32:
                name = b"chatcmpl-" + given
            if b'"stream": true' in body or b'"stream":true' in body:
                asyncio.get_running_loop().create_task(self._stream(name))
                return
            content = self.whole.replace(ID, name, 1)
        else:
            content = b'{"object":"list","data":[{"id":"agent","object":"model"}]}'
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content) + content
        )

    async def _stream(self, name: bytes) -> None:
        assert self._transport is not None
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        due = loop.time()
        for event in self.events:
            named = event.replace(ID, name, 1)
            self._transport.write(b"%x\r\n%s\r\n" % (len(named), named))
            due += self.pace_s
            await asyncio.sleep(max(0.0, due - loop.time()))
        self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")  # the end follows at once, as in vLLM


async def serve(engine: type[Upstream]) -> None:
    """Serve as the command line specifies, until the process is ended."""
    port, n_prompt, n_reply = (int(argument) for argument in sys.argv[1:4])
    engine.whole, engine.events = whole_reply(n_prompt, n_reply), stream_events(n_prompt, n_reply)
    server = await asyncio.get_running_loop().create_server(engine, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(Upstream))
