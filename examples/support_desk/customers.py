"""Simulated customers: they write tickets, get the agent's answers, and rate them, all over HTTP.

Customers arrive as a Poisson process, each with one ticket. While too many are in progress, the next customer waits
until one of them is done. A timer sends the commits, as in production.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import OpenAIError

from examples.support_desk.agent import SupportAgent
from examples.support_desk.desk import Ticket, format_answer, parse_answer, satisfaction, write_ticket

COMMIT_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Episode:
    """One answered and rated ticket."""

    at: float  # Unix seconds
    reward: float  # quality of the answer, independent of the rating
    desk_right: bool
    priority_right: bool


@dataclass(slots=True)
class Books:
    """The record of all customers so far."""

    episodes: list[Episode] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    commits: int = 0


# (ticket, reward of the answer in [0, 1]) → fields of a request to /feedback
Voice = Callable[[Ticket, float], dict[str, Any]]

_moods = random.Random(0)  # of customers who rate with thumbs


def say_reward(_ticket: Ticket, worth: float) -> dict[str, Any]:
    return {"reward": worth}


def say_thumbs(_ticket: Ticket, worth: float) -> dict[str, Any]:
    """Rate up with a probability equal to the reward: half of the time for an answer that is half right."""
    return {"rating": "up" if _moods.random() < worth else "down"}


def say_correction(ticket: Ticket, _worth: float) -> dict[str, Any]:
    return {"correction": format_answer(ticket.desk, ticket.priority)}


def say_comment(ticket: Ticket, _worth: float) -> dict[str, Any]:
    return {"comment": format_answer(ticket.desk, ticket.priority)}


class Customers:
    """`run` starts `per_s` customers a second on average, until `episodes` have arrived or `stop` is called."""

    def __init__(
        self,
        service_url: str,
        *,
        seed: int,
        per_s: float,
        at_most: int,
        voice: Voice = say_reward,
    ) -> None:
        self.books = Books()
        self._url = service_url
        self._seed = seed
        self._draw = random.Random(seed)
        self._per_s = per_s
        self._places = asyncio.Semaphore(at_most)
        self._voice = voice
        self._stopping = False

    def stop(self) -> None:
        """Start no new tickets. Tickets in progress are still answered."""
        self._stopping = True

    async def run(self, episodes: int) -> None:
        agent = SupportAgent(self._url + "/v1")
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as http:
            committing = asyncio.create_task(self._commit_from_a_timer(http), name="commits")
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
        ticket = write_ticket(random.Random(f"{self._seed} {number}"))
        try:
            msg_id, answer = await agent.route(ticket.text)
            desk, priority = parse_answer(answer)
            worth = satisfaction(ticket, desk, priority)
            reply = await http.post("/feedback", json={"msg_ids": [msg_id], **self._voice(ticket, worth)})
            reply.raise_for_status()
        except (OpenAIError, httpx.HTTPError) as error:
            self.books.failures.append(f"{type(error).__name__}: {error}")
            return
        finally:
            self._places.release()
        self.books.episodes.append(Episode(time.time(), worth, desk == ticket.desk, priority == ticket.priority))

    async def _commit_from_a_timer(self, http: httpx.AsyncClient) -> None:
        while True:
            await asyncio.sleep(COMMIT_EVERY_S)
            try:
                (await http.post("/commit")).raise_for_status()
            except httpx.HTTPError as error:
                self.books.failures.append(f"commit: {error}")
                continue
            self.books.commits += 1
