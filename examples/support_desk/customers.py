"""Simulated customers: they write tickets, get the agent's answer, and say how satisfied they are. All over HTTP.

They come in at random moments (a Poisson process), each with one ticket; whoever finds too many others waiting comes
in when one of them is done. Commits come as they would in production: from a timer, not from the one who rates.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
from openai import OpenAIError

from examples.support_desk.agent import SupportAgent
from examples.support_desk.desk import Ticket, parse_answer, satisfaction, write_ticket

COMMIT_EVERY_S = 0.5

# what a customer says of an answer: ticket, desk, priority, a random generator → reward
Judge = Callable[[Ticket, str | None, str | None, random.Random], float]


@dataclass(frozen=True, slots=True)
class Episode:
    """One ticket, answered and rated."""

    at: float  # Unix seconds
    reward: float  # how good the answer was, whatever the customer said
    desk_right: bool
    priority_right: bool


@dataclass(slots=True)
class Books:
    """What the customers have seen so far."""

    episodes: list[Episode] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    commits: int = 0


def honest(ticket: Ticket, desk: str | None, priority: str | None, _draw: random.Random) -> float:
    """The customer says what the answer was worth."""
    return satisfaction(ticket, desk, priority)


class Customers:
    """`run` lets customers in, `per_s` of them on average, until `episodes` have come, or until told to stop."""

    def __init__(self, service_url: str, *, seed: int, per_s: float, at_most: int, judge: Judge = honest) -> None:
        self.books = Books()
        self._url = service_url
        self._seed = seed
        self._draw = random.Random(seed)
        self._per_s = per_s
        self._places = asyncio.Semaphore(at_most)
        self._judge = judge
        self._stopping = False

    def stop(self) -> None:
        """Let tickets in flight be answered, and begin no new ones."""
        self._stopping = True

    async def run(self, episodes: int) -> None:
        agent = SupportAgent(self._url + "/v1")
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as http:
            committing = asyncio.create_task(self._commit_now_and_then(http), name="commits")
            try:
                async with asyncio.TaskGroup() as group:
                    due = time.monotonic()
                    for number in range(episodes):
                        await self._places.acquire()
                        due = max(due, time.monotonic() - 1.0) + self._draw.expovariate(self._per_s)
                        await asyncio.sleep(max(0.0, due - time.monotonic()))
                        if self._stopping:
                            break
                        group.create_task(self._customer(number, agent, http), name=f"customer-{number}")
            finally:
                committing.cancel()
                await asyncio.gather(committing, return_exceptions=True)
                await agent.close()

    async def _customer(self, number: int, agent: SupportAgent, http: httpx.AsyncClient) -> None:
        draw = random.Random(f"{self._seed} {number}")
        ticket = write_ticket(draw)
        try:
            msg_id, answer = await agent.route(ticket.text)
            desk, priority = parse_answer(answer)
            said = self._judge(ticket, desk, priority, draw)
            reply = await http.post("/feedback", json={"msg_ids": [msg_id], "reward": said})
            reply.raise_for_status()
        except (OpenAIError, httpx.HTTPError) as error:
            self.books.failures.append(f"{type(error).__name__}: {error}")
            return
        finally:
            self._places.release()
        worth = satisfaction(ticket, desk, priority)
        self.books.episodes.append(Episode(time.time(), worth, desk == ticket.desk, priority == ticket.priority))

    async def _commit_now_and_then(self, http: httpx.AsyncClient) -> None:
        while True:
            await asyncio.sleep(COMMIT_EVERY_S)
            try:
                (await http.post("/commit")).raise_for_status()
            except httpx.HTTPError as error:
                self.books.failures.append(f"commit: {error}")
                continue
            self.books.commits += 1
