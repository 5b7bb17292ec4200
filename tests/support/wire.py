"""Bytes on a connection: requests that no HTTP library would send, and strictly read answers."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass

import h11

from tests.support.servers import RunningExplorer

CHAT_BODY = b'{"messages": [{"role": "user", "content": "hi"}]}'
STREAM_BODY = b'{"messages": [], "stream": true}'


def connect(explorer: RunningExplorer, first: bytes = b"", timeout_s: float = 60) -> socket.socket:
    """A connection on which every write is a separate packet."""
    url = explorer.http.base_url
    opened = socket.create_connection((url.host, url.port), timeout=timeout_s)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if first:
        opened.sendall(first)
    return opened


def get(path: str, *fields: str) -> bytes:
    return ("\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *fields]) + "\r\n\r\n").encode()


def post(path: str, body: bytes, *fields: str, length: int | None = None) -> bytes:
    """A POST request. length: the announced length, if not the body's."""
    head = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *fields]
    head.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def post_chunked(path: str, body: bytes, *fields: str, trailers: bytes = b"") -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *fields, "Transfer-Encoding: chunked"]
    chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
    return "\r\n".join(head).encode() + b"\r\n\r\n" + chunk + b"0\r\n" + trailers + b"\r\n"


def send_slowly(opened: socket.socket, *parts: bytes) -> None:
    """Send the parts with pauses, so that the explorer reads each separately."""
    for part in parts:
        opened.sendall(part)
        time.sleep(0.03)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


def read_answer(opened: socket.socket, method: str = "GET") -> Answer:
    """The next answer. Fails if anything else arrives before the connection is idle or closed."""
    (answer,) = read_answers(opened, 1, method)
    return answer


def read_answers(opened: socket.socket, count: int, method: str = "GET") -> list[Answer]:
    """`count` answers to requests of that method. Fails if they end early, or if bytes follow."""
    client = h11.Connection(h11.CLIENT)
    answers: list[Answer] = []
    while len(answers) < count:
        client.send(h11.Request(method=method, target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
        client.send(h11.EndOfMessage())
        answers.append(_next_answer(client, opened))
        if len(answers) < count:
            client.start_next_cycle()
    rest, _ = client.trailing_data
    assert not rest, f"bytes after the last answer: {rest[:200]!r}"
    return answers


def _next_answer(client: h11.Connection, opened: socket.socket) -> Answer:
    head: h11.Response | None = None
    body = b""
    while True:
        match client.next_event():
            case h11.NEED_DATA:
                client.receive_data(opened.recv(1 << 16))
            case h11.Response() as head:
                pass
            case h11.Data() as data:
                body += data.data
            case h11.EndOfMessage():
                assert head is not None
                headers = {name.decode().lower(): value.decode("latin-1") for name, value in head.headers}
                return Answer(head.status_code, headers, body)
            case h11.InformationalResponse():
                pass
            case other:
                raise AssertionError(f"no answer, but {other}")


def read_to_end(opened: socket.socket, timeout_s: float = 60) -> bytes:
    """All bytes until the explorer closes the connection. Fails if it does not."""
    opened.settimeout(timeout_s)
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while part := opened.recv(1 << 16):
            received += part
    return bytes(received)
