"""Client: an agent's connection to the explorer, for threads. wire.py builds its requests."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import httpx

from flywheel import wire
from flywheel.addresses import without_credentials
from flywheel.admin import Admin
from flywheel.connections import Connections
from flywheel.credit import Credit
from flywheel.errors import ConfigError, Unreachable, describe
from flywheel.model import Model
from flywheel.results import Committed, Receipts, Status, Version
from flywheel.run import Run, SyncRun
from flywheel.wire import Answer, Ask, Outcome, Pause, Steps

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI
    from typing_extensions import Unpack

    from flywheel.wire import Saying

T = TypeVar("T")


@dataclass(frozen=True)
class Explorer:
    """The explorer's address and its options, for the runs and models of a client."""

    owner: Any  # the client
    url: str
    key: str | None
    name: str
    retry_s: float
    connections: Connections

    @property
    def shown_url(self) -> str:
        """The address without credentials, for messages."""
        return without_credentials(self.url)

    def model(
        self, run: Run | None = None, version: int | None = None, params: Mapping[str, Any] | None = None
    ) -> Model:
        """Return the model that the explorer serves, or one version of it."""
        name = self.name if version is None else f"{self.name}@{version}"
        return Model(f"{self.url}/v1", name, self.key, params or {}, {}, run, self.connections)


class Base:
    """The common parts of both clients, and the methods that need no response."""

    def __init__(self, url: str | None, key: str | None, model: str | None, retry_s: float) -> None:
        url = url or os.environ.get("FLYWHEEL_URL")
        if not url:
            raise ConfigError("no address of an explorer: give url, or set FLYWHEEL_URL=http://HOST:8010")
        key = key or os.environ.get("FLYWHEEL_KEY")
        wire.check_key(key)
        model = model or os.environ.get("FLYWHEEL_MODEL") or "agent"
        self.explorer = Explorer(self, wire.read_url(url), key, model, retry_s, Connections())

    @property
    def url(self) -> str:
        """The explorer's address."""
        return self.explorer.url

    def model(self, version: int | None = None, **params: Any) -> Model:
        """Return the served model, or one version; its chats belong to the context's run. params: fields of chats."""
        return self.explorer.model(version=version, params=params)

    def openai(self, **options: Any) -> OpenAI:
        """Return OpenAI's client for the served model; its chats belong to the context's run."""
        return self.model().openai(**options)

    def async_openai(self, **options: Any) -> AsyncOpenAI:
        """Return OpenAI's client for asyncio."""
        return self.model().async_openai(**options)

    def _headers(self) -> dict[str, str]:
        key = self.explorer.key
        return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def _unanswered(self, ask: Ask, cause: Exception) -> Unreachable:
        """Return the error of a request that got no response."""
        error = Unreachable(
            f"{ask.method} {ask.path}: no answer ({describe(cause)}); is the explorer at {self.explorer.shown_url} up?"
        )
        error.__cause__ = cause
        return error

    def _request(self, http: httpx.Client | httpx.AsyncClient, ask: Ask) -> httpx.Request:
        headers = {**self._headers(), **({"Idempotency-Key": ask.key} if ask.key else {})}
        limit_s = http.timeout if ask.limit_s is None else ask.limit_s
        address = self.url + ask.path
        return http.build_request(
            ask.method, address, content=ask.body, headers=headers, params=ask.query, timeout=limit_s
        )


class Client(Base):
    """A client of an explorer, for threads. FLYWHEEL_URL, FLYWHEEL_KEY and FLYWHEEL_MODEL set url, key and model.

    model: its name in the explorer's configuration (model.name); "agent" by default.

    Feedback that is sent twice counts once, because it has an Idempotency-Key. A request without a response, or
    with 408, 429, 503, or a proxy's 502 or 504, is retried for retry_s seconds; Retry-After is respected. Raises
    ConfigError before sending; Refused, Away and Unreachable.

    >>> client = Client("http://127.0.0.1:8010", model="agent")
    >>> client.url
    'http://127.0.0.1:8010'
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        key: str | None = None,
        model: str | None = None,
        timeout_s: float = 60.0,
        retry_s: float = 30.0,
        http: httpx.Client | None = None,
    ) -> None:
        super().__init__(url, key, model, retry_s)
        self._http = http or httpx.Client(timeout=timeout_s, transport=self.explorer.connections.sync())
        self.admin = Admin(self)

    def drive(self, steps: Steps[T]) -> T:
        """Send the requests that a call yields, and return its result."""
        outcome: Outcome = None
        try:
            while True:
                step = steps.send(outcome)
                outcome = None
                if isinstance(step, Pause):
                    time.sleep(step.seconds)
                else:
                    outcome = self._send(step)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    def _send(self, ask: Ask) -> Outcome:
        try:
            response = self._http.send(self._request(self._http, ask))
        except httpx.RequestError as exc:
            return self._unanswered(ask, exc)
        return Answer(response.status_code, response.headers, response.content)

    def feedback(
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
        return self.drive(wire.send_feedback(body, idempotency_key, unknown_ok, self.explorer.retry_s))

    def commit(
        self, *, task_id: str | None = None, run_id: str | None = None, before: float | None = None
    ) -> Committed:
        """Make rewarded rows READY: all, or those of a task or run, or recorded before a time (Unix seconds)."""
        return self.drive(wire.send_commit(task_id, run_id, before, self.explorer.retry_s))

    def status(self) -> Status:
        """Return rows by state, versions, trainers."""
        return self.drive(wire.get_status(self.explorer.retry_s))

    def versions(self) -> list[Version]:
        """Return all versions, oldest first."""
        return self.drive(wire.get_versions(self.explorer.retry_s))

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Wait until the explorer can serve and record chats. Raises Away or Unreachable after timeout_s."""
        self.drive(wire.get_ready(timeout_s))

    def run(self, task_id: str | None = None, run_id: str | int | None = None, *, credit: Credit = "once") -> SyncRun:
        """A run of one attempt at a task: `with client.run() as run:`.

        Without ids, it is run "0" of a new task; with a task alone, a new run of that task. Both ids name one run,
        which can be entered again, for example by another process.
        """
        return SyncRun(self.explorer, task_id, run_id, credit)

    def prefer(self, better: str, worse: str | Sequence[str]) -> Receipts:
        """Send that a person prefers one reply over others."""
        return self.feedback(better, preferred_over=[worse] if isinstance(worse, str) else worse)

    def rate(self, msg_id: str, rating: Literal["up", "down"]) -> Receipts:
        """Send a person's rating of a reply."""
        return self.feedback(msg_id, rating=rating)

    def correct(self, msg_id: str, text: str) -> Receipts:
        """Send the right reply, as a person wrote it."""
        return self.feedback(msg_id, correction=text)

    def comment(self, msg_id: str, text: str) -> Receipts:
        """Send a person's comment on a reply."""
        return self.feedback(msg_id, comment=text)

    def close(self) -> None:
        """Close the connections; models of this client cannot be used afterwards."""
        self._http.close()
        self.explorer.connections.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
