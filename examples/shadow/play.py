"""Production with shadow traffic: customers arrive, people rate, and all counts are taken from outside."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import flywheel

from examples.shadow.agent import support
from examples.shadow.people import Ratings, answer_shown, simulated_people
from examples.shadow.reward import reward
from examples.shadow.services import TrialOffices, office, serve, strong_model
from examples.shadow.world import REFUNDED, Office, Ticket, write_ticket

SHARE = 0.2  # fraction of production's calls that are replayed
RUNS_PER_CALL = 8
CUSTOMERS_PER_S = 10.0
COMMIT_EVERY_S = 1.0
AT_ONCE = 24


@dataclass
class Books:
    """The record of a run. A point is the seconds since the start and the reward of an answer."""

    production: list[tuple[float, float]] = field(default_factory=list)
    shadow: list[tuple[float, float]] = field(default_factory=list)
    took_ms: list[float] = field(default_factory=list)  # of production's answers
    failures: list[str] = field(default_factory=list)  # of production
    refunded: int = 0  # by production, according to its replies

    def figures(self, desk: Office, stats: flywheel.Stats, ratings: Ratings) -> dict[str, Any]:
        """Return the figures of a whole run. The number of refunds comes from the office, which counts every call."""
        worth = [value for _, value in self.production]
        return {
            "production_calls": len(worth),
            "production_failures": len(self.failures),
            "production_reward": round(statistics.fmean(worth), 4) if worth else None,
            "production_median_ms": round(statistics.median(self.took_ms), 1) if worth else None,
            "refunds_paid": len(desk.refunds),
            "refunds_by_production": self.refunded,
            "refunds_by_shadow": len(desk.refunds) - self.refunded,
            "shadow_runs": stats.runs,
            "failures": dict(stats.failed),
            "shadow_unsafe": stats.unsafe,
            "shadow_dropped": stats.dropped,
            "shadow_unrated": stats.unrewarded,
            "ratings": dict(ratings.given),
            "reward_first": tenth(self.shadow, first=True),
            "reward_last": tenth(self.shadow, first=False),
        }


def tenth(points: list[tuple[float, float]], *, first: bool) -> float | None:
    """Return the mean of the first or the last tenth."""
    size = max(1, len(points) // 10)
    some = [worth for _, worth in (points[:size] if first else points[-size:])]
    return round(statistics.fmean(some), 4) if some else None


async def go_live(
    url: str,
    *,
    seconds: float,
    seed: int,
    agent_options: Mapping[str, Any],
    model: str = "agent",
    shuffled: bool = False,
    per_s: float = CUSTOMERS_PER_S,
) -> tuple[Books, dict[str, Any]]:
    """Serve customers for some time, with shadow traffic. Returns the books and all figures.

    agent_options: added to each request. model: its name. shuffled: give each run the rating of an earlier run of
    another ticket.
    """
    books, desk, ratings, tickets = Books(), Office(), Ratings(), dict[str, Ticket]()
    began, earlier, draw = time.monotonic(), deque[tuple[str, float]](maxlen=256), random.Random(seed)

    async def rated(run: flywheel.Run, reply: str | None) -> float | None:
        ticket = tickets[run.task_id]
        books.shadow.append((time.monotonic() - began, reward(ticket, reply, run.attempts)["reward"]))
        rating = await ratings.rate(ticket, answer_shown(reply, run.attempts))
        return rating if rating is None or not shuffled else exchange(rating, run.task_id, earlier, draw)

    with serve(office(desk)) as office_url, serve(strong_model) as strong, serve(ratings.answer) as page:
        print(f"people rate the trainee's answers at {page}", file=sys.stderr)
        runner = _trainee(url, model, rated, seed)
        production = flywheel.Model.of(f"{strong}/v1", "strong", key="unused")
        answered = runner.watch(support, production=production)
        people = asyncio.create_task(simulated_people(page, tickets, seed=seed))
        with contextlib.ExitStack() as stack:
            await asyncio.to_thread(runner.start)
            stack.callback(people.cancel)

            async def customer(number: int) -> None:
                ticket = write_ticket(f"{seed}-{number}")
                tickets[ticket.name] = ticket
                request = {"message": ticket.message, "office": office_url, **agent_options}
                await _serve_one(answered, ticket, request, books, began)

            await _arrivals(customer, seconds, per_s, seed)
            await asyncio.to_thread(runner.stop)
        await asyncio.gather(people, return_exceptions=True)
        return books, books.figures(desk, runner.stats, ratings)


def exchange(rating: float, task_id: str, earlier: deque[tuple[str, float]], draw: random.Random) -> float | None:
    """Return the rating of an earlier run of another ticket; None if there is none yet. Adds this one to them."""
    others = [one for other, one in earlier if other != task_id]
    earlier.append((task_id, rating))
    return draw.choice(others) if others else None


def _trainee(
    url: str, model: str, rated: Callable[[flywheel.Run, str | None], Awaitable[float | None]], seed: int
) -> flywheel.TrainingRunner:
    return flywheel.TrainingRunner(
        url,
        model=model,
        reward=rated,
        select=flywheel.SamplingRate(SHARE, seed=seed) & flywheel.Marked(),
        repeat_time=RUNS_PER_CALL,
        commit_every_s=COMMIT_EVERY_S,
        at_once=AT_ONCE,
        tools=flywheel.RecordedTools(),
    )


async def _serve_one(answered: Any, ticket: Ticket, request: dict[str, Any], books: Books, began: float) -> None:
    at = time.monotonic()
    try:
        with flywheel.marked(task_id=ticket.name):
            reply = await answered(request)
    except Exception as exc:  # noqa: BLE001 — a production call's failure is what is counted here
        books.failures.append(f"{type(exc).__name__}: {exc}")
        return
    books.took_ms.append(1000 * (time.monotonic() - at))
    books.refunded += reply == REFUNDED
    attempts = [("refund", {"order": ticket.order})] if reply == REFUNDED else []
    books.production.append((time.monotonic() - began, reward(ticket, reply, attempts)["reward"]))


async def _arrivals(customer: Any, seconds: float, per_s: float, seed: int) -> None:
    """Let customers arrive as a Poisson process. Returns when the last one has an answer."""
    draw, until, number = random.Random(seed), time.monotonic() + seconds, 0
    async with asyncio.TaskGroup() as group:
        while time.monotonic() < until:
            group.create_task(customer(number))
            number += 1
            await asyncio.sleep(draw.expovariate(per_s))


def evaluate(url: str, model: flywheel.Model, agent_options: Mapping[str, Any], tickets: int) -> flywheel.Evaluation:
    """Evaluate a model on separate tickets with separate offices."""
    offices = TrialOffices()
    with serve(offices.answer) as office_url:

        async def workflow(task: dict[str, str], trainee: flywheel.Model) -> dict[str, Any]:
            ticket = write_ticket(task["name"])
            request = {"message": ticket.message, "office": f"{office_url}/{ticket.name}", **agent_options}
            reply = await support(request, trainee)
            attempts = [("refund", {"order": order}) for order in offices.desks.pop(ticket.name, Office()).asked]
            return reward(ticket, reply, attempts)

        tasks = [{"name": f"held-out-{number}"} for number in range(tickets)]
        return flywheel.evaluate(workflow, tasks, model=model, url=url, at_once=16, params={"temperature": 0.0})
