"""One turn: concurrent streams, an event while they run, and short chats that are due during the event."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

TOKENS = 200  # of each stream
UNDER_WAY = 40  # tokens of each stream before the event
LATE_TOKENS = 2  # of each short chat
LATE_CHATS = 5  # short chats, at least
LATE_EVERY_S = 0.05  # shorter than a pause, so that one is due while the engine is paused
LATE_LIMIT_S = 60.0  # after the event, for an answer of the published version


@dataclass
class Stream:
    """One stream as its caller saw it."""

    status: int = 0
    msg_id: str = ""
    failed: str | None = None
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    begun_at: float = 0.0  # time.monotonic(), like event_times
    event_times: list[float] = field(default_factory=list)
    event_ends: list[int] = field(default_factory=list)  # tokens of the reply after each event

    @property
    def longest_gap_s(self) -> float:
        return self.longest_gap_since(0.0)

    def longest_gap_since(self, moment: float) -> float:
        """The longest gap that ends after `moment`, time.monotonic()."""
        gaps = (later - earlier for earlier, later in pairwise(self.event_times) if later > moment)
        return max(gaps, default=0.0)

    def resumed_at(self, moment: float) -> float:
        """The end of the longest gap that ends after `moment`, both time.monotonic()."""
        gaps = ((later - earlier, later) for earlier, later in pairwise(self.event_times) if later > moment)
        return max(gaps)[1]

    def tokens_before_longest_gap(self, moment: float) -> int:
        """Tokens of prompt and reply when the longest gap that ends after `moment` began."""
        gaps = enumerate(pairwise(self.event_times))
        _, ends = max(((later - earlier, n) for n, (earlier, later) in gaps if later > moment), default=(0.0, -1))
        return self.prompt_tokens + (self.event_ends[ends] if self.event_ends else 0)


@dataclass
class LateChat:
    """A short chat during the event.

    first_token_s: since the chat was due, whether or not it could be sent then. Infinite, like first_token_at, if it
    has no token. failed: why it failed, also after its first token.
    """

    version: int
    first_token_s: float
    first_token_at: float
    failed: str | None = None


@dataclass
class Turn:
    """The observations of a turn.

    began_at, ended_at: when the event began and was seen to have ended; None: there was none. row_at: when the row of
    the published version was committed.
    """

    streams: list[Stream]
    late: list[LateChat]
    began_at: float | None = None
    ended_at: float | None = None
    under_way_at: float = 0.0  # when every stream had its first tokens
    published: int | None = None
    row_at: float = 0.0

    @property
    def frozen_tokens(self) -> int:
        """Tokens of all streams, including prompts, when the reload paused them."""
        assert self.began_at is not None
        return sum(stream.tokens_before_longest_gap(self.began_at) for stream in self.streams)


class Callers:
    """The callers. While `open` is not set, nobody sends a new request (drain.py)."""

    def __init__(self, url: str, every_s: float = LATE_EVERY_S) -> None:
        """every_s: how often a short chat is due during an event."""
        self._url = f"{url}/v1/chat/completions"
        self._every_s = every_s
        self.open = asyncio.Event()
        self.open.set()
        self.in_flight = 0
        gc.collect()
        gc.freeze()  # this process also has a model: a garbage collection over it would count as a gap
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=300), connector=aiohttp.TCPConnector(limit=0)
        )

    async def aclose(self) -> None:
        await self._http.close()

    async def turn(
        self, streams: int, happen: Callable[[], Awaitable[int | None]] | None, chats: int = LATE_CHATS
    ) -> Turn:
        """Run streams, start the event once all have begun, and send short chats until it is over.

        Each `every_s`, a short chat is due; it does not wait for the end of those before. chats: their minimum.
        """
        running = [Stream() for _ in range(streams)]
        tasks = [asyncio.create_task(self._stream(stream, number)) for number, stream in enumerate(running)]
        turn = Turn(running, [])
        while not all(len(stream.token_ids) >= UNDER_WAY or stream.failed for stream in running):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        turn.under_way_at = time.monotonic()
        happening = None
        if happen is not None:
            turn.began_at = time.monotonic()
            happening = asyncio.ensure_future(happen())
        late: list[asyncio.Task[None]] = []
        while len(late) < chats or not self._is_over(turn, happening):
            due = turn.under_way_at + len(late) * self._every_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            late.append(asyncio.create_task(self._late_chat(turn, due)))
        await asyncio.gather(*tasks, *late)
        return turn

    async def ask(self, model: str) -> int:
        """The version that answers a short chat with this model; -1 for an error."""
        return await self._send(f"somebody asks at {time.time_ns()}", 1, Stream(), model)

    async def side_by_side(self, models: list[str]) -> list[Stream]:
        """Run a stream of each of these models, at once."""
        streams = [Stream() for _ in models]
        await asyncio.gather(*(self._stream(s, n, m) for n, (s, m) in enumerate(zip(streams, models, strict=True))))
        return streams

    def _is_over(self, turn: Turn, happening: asyncio.Future[int | None] | None) -> bool:
        if happening is None:
            return True
        if not happening.done():
            return False
        if turn.ended_at is None:
            turn.published, turn.ended_at = happening.result(), time.monotonic()
        if turn.published is None or time.monotonic() > turn.ended_at + LATE_LIMIT_S:
            return True
        return any(chat.version == turn.published for chat in turn.late)

    async def _stream(self, stream: Stream, number: int, model: str | None = None) -> None:
        words = f"caller {number} asks at {time.time_ns()}"
        await self._send(words, TOKENS, stream, model)

    async def _late_chat(self, turn: Turn, due: float) -> None:
        stream = Stream()
        version = await self._send(f"somebody asks at {time.time_ns()}", LATE_TOKENS, stream)
        first = stream.event_times[0] if stream.event_times else math.inf
        failed = stream.failed or (None if len(stream.token_ids) == LATE_TOKENS else "truncated")
        turn.late.append(LateChat(version, first - due, first, failed))

    async def _send(self, words: str, tokens: int, stream: Stream, model: str | None = None) -> int:
        """Send a chat and record the answer. Returns the version in the answer's head, -1 for an error."""
        await self.open.wait()
        body = {
            "messages": [{"role": "user", "content": words}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **({} if model is None else {"model": model}),
        }
        self.in_flight += 1
        stream.begun_at = time.monotonic()
        try:
            async with self._http.post(self._url, json=body) as reply:
                stream.status = reply.status
                if reply.status != 200:
                    stream.failed = (await reply.text())[:300]
                    return -1
                async for line in reply.content:
                    self._note(stream, line)
                return int(reply.headers["X-Flywheel-Version"])
        except (aiohttp.ClientError, TimeoutError) as error:
            stream.failed = repr(error)
            return -1
        finally:
            self.in_flight -= 1

    def _note(self, stream: Stream, line: bytes) -> None:
        if not line.startswith(b"data: {"):
            return
        event: dict[str, Any] = json.loads(line[6:])
        if "error" in event:
            stream.failed = str(event["error"])
            return
        stream.msg_id = event["id"]
        stream.prompt_tokens = len(event.get("prompt_token_ids") or ()) or stream.prompt_tokens
        for choice in event["choices"]:
            if ids := choice.get("token_ids"):
                stream.token_ids += ids
                stream.event_times.append(time.monotonic())
                stream.event_ends.append(len(stream.token_ids))
