"""AsyncClient: the client for asyncio. wire.py builds its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypeVar

import httpx

from flywheel import wire
from flywheel.admin import AsyncAdmin
from flywheel.client import Base
from flywheel.credit import Credit
from flywheel.results import Committed, Receipts, Status, Version
from flywheel.run import AsyncRun
from flywheel.wire import Answer, Ask, Outcome, Pause, Steps

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flywheel.wire import Saying

T = TypeVar("T")


class AsyncClient(Base):
    """The client for asyncio: the methods of Client, awaited. `openai`, `model` and `run` need no await.

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
        """Send the requests that a call yields, and return its result."""
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
        except httpx.RequestError as exc:
            return self._unanswered(ask, exc)
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
        """Send feedback about messages, a task or a run: reward, rating, metrics, comment, correction, preferred_over.

        scope="conversation" targets all turns of the conversations; each=True gives a reward to every message, instead
        of once to the whole. Raises NothingKnown if no target is known, unless unknown_ok.
        """
        body = wire.feedback_body(msg_ids, task_id, run_id, said)
        return await self.drive(wire.send_feedback(body, idempotency_key, unknown_ok, self.explorer.retry_s))

    async def commit(
        self, *, task_id: str | None = None, run_id: str | None = None, before: float | None = None
    ) -> Committed:
        """Make rewarded rows READY: all, or those of a task or run, or recorded before a time (Unix seconds)."""
        return await self.drive(wire.send_commit(task_id, run_id, before, self.explorer.retry_s))

    async def status(self) -> Status:
        """Return rows by state, versions, trainers."""
        return await self.drive(wire.get_status(self.explorer.retry_s))

    async def versions(self) -> list[Version]:
        """Return all versions, oldest first."""
        return await self.drive(wire.get_versions(self.explorer.retry_s))

    async def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Wait until the explorer can serve and record chats. Raises Away or Unreachable after timeout_s."""
        await self.drive(wire.get_ready(timeout_s))

    def run(self, task_id: str | None = None, run_id: str | int | None = None, *, credit: Credit = "once") -> AsyncRun:
        """A run of one attempt at a task: `async with client.run() as run:`.

        Without ids, it is run "0" of a new task; with a task alone, a new run of that task. Both ids name one run,
        which can be entered again, for example by another process.
        """
        return AsyncRun(self.explorer, task_id, run_id, credit)

    async def prefer(self, better: str, worse: str | Sequence[str]) -> Receipts:
        """Send that a person prefers one reply over others."""
        return await self.feedback(better, preferred_over=[worse] if isinstance(worse, str) else worse)

    async def rate(self, msg_id: str, rating: Literal["up", "down"]) -> Receipts:
        """Send a person's rating of a reply."""
        return await self.feedback(msg_id, rating=rating)

    async def correct(self, msg_id: str, text: str) -> Receipts:
        """Send the right reply, as a person wrote it."""
        return await self.feedback(msg_id, correction=text)

    async def comment(self, msg_id: str, text: str) -> Receipts:
        """Send a person's comment on a reply."""
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
