"""AsyncClient: the same client for asyncio. wire.py makes what it sends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypeVar

import httpx

from flywheel import wire
from flywheel.admin import AsyncAdmin
from flywheel.client import Base
from flywheel.results import Committed, Receipts, Status, Version
from flywheel.run import AsyncRun, Credit
from flywheel.wire import Answer, Ask, Outcome, Pause, Steps

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flywheel.wire import Saying

T = TypeVar("T")


class AsyncClient(Base):
    """The same client for asyncio: the same names, awaited. `openai`, `model` and `run` need no await.

    >>> client = AsyncClient("http://127.0.0.1:8010")
    >>> client.model(3).name
    'agent@3'
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        key: str | None = None,
        model: str | None = None,
        timeout_s: float = 60.0,
        retry_s: float = 30.0,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        super().__init__(url, key, model, retry_s)
        self._http = http or httpx.AsyncClient(timeout=timeout_s, transport=self.explorer.connections.asynchronous())
        self.admin = AsyncAdmin(self)

    async def drive(self, steps: Steps[T]) -> T:
        """Send what a call yields, and return its result."""
        outcome: Outcome = None
        try:
            while True:
                step = steps.send(outcome)
                outcome = None
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                else:
                    outcome = await self._send(step)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    async def _send(self, ask: Ask) -> Outcome:
        try:
            response = await self._http.send(self._request(self._http, ask))
        except httpx.TransportError as exc:
            return exc
        return Answer(response.status_code, response.headers, response.content)

    async def feedback(
        self,
        msg_ids: str | Sequence[str] = (),
        *,
        task_id: str | None = None,
        run_id: str | None = None,
        idempotency_key: str | None = None,
        unknown_ok: bool = False,
        **said: Unpack[Saying],
    ) -> Receipts:
        """Say something about messages, a task or a run: reward, rating, metrics, comment, correction, preferred_over.

        scope="conversation" reaches all turns of the conversations; each=True gives a reward to every message, where it
        otherwise counts once. Raises NothingKnown when no target is known, unless unknown_ok.
        """
        body = wire.feedback_body(msg_ids, task_id, run_id, said)
        return await self.drive(wire.send_feedback(body, idempotency_key, unknown_ok, self.explorer.retry_s))

    async def commit(
        self, *, task_id: str | None = None, run_id: str | None = None, before: float | None = None
    ) -> Committed:
        """Make rewarded rows ready: all, or those of a task or run, or recorded before a time (Unix seconds)."""
        return await self.drive(wire.send_commit(task_id, run_id, before, self.explorer.retry_s))

    async def status(self) -> Status:
        """Rows by state, versions, trainers."""
        return await self.drive(wire.get_status(self.explorer.retry_s))

    async def versions(self) -> list[Version]:
        """All versions, oldest first."""
        return await self.drive(wire.get_versions(self.explorer.retry_s))

    async def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Wait until a chat would be served and recorded. Raises Away or Unreachable after timeout_s."""
        await self.drive(wire.get_ready(timeout_s))

    def run(self, task_id: str | None = None, run_id: str | int | None = None, *, credit: Credit = "once") -> AsyncRun:
        """The chats of one attempt at a task: `async with client.run() as run:`. Without ids a new task's run "0"."""
        return AsyncRun(self.explorer, task_id, run_id, credit)

    async def prefer(self, better: str, worse: str | Sequence[str]) -> Receipts:
        """A person found one reply better than others."""
        return await self.feedback(better, preferred_over=[worse] if isinstance(worse, str) else worse)

    async def rate(self, msg_id: str, rating: Literal["up", "down"]) -> Receipts:
        """A person rated a reply."""
        return await self.feedback(msg_id, rating=rating)

    async def correct(self, msg_id: str, text: str) -> Receipts:
        """A person wrote the reply that would have been right."""
        return await self.feedback(msg_id, correction=text)

    async def comment(self, msg_id: str, text: str) -> Receipts:
        """A person said something about a reply."""
        return await self.feedback(msg_id, comment=text)

    async def close(self) -> None:
        """Close the connections of the running loop."""
        await self._http.aclose()
        await self.explorer.connections.aclose()
        self.explorer.connections.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
