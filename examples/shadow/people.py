"""A page on which people rate the trainee's answers, and simulated people who use it.

    GET  /          the page: unrated answers, each with two buttons
    GET  /waiting   the same as JSON
    POST /rate      item=NUMBER and rating=up or down

Simulated people use the same endpoints as real people. Sometimes they press the wrong button.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from html import escape
from typing import Any
from urllib.parse import parse_qs

import httpx

from examples.shadow.world import RECORDS, REFUND, Ticket

SLIPS = 0.03  # fraction of ratings that are wrong
SHOWN = 50
STYLE = "body{font:16px/1.5 system-ui,sans-serif;max-width:44em;margin:2em auto}form{display:inline}li{margin:1em 0}"


class Ratings:
    """The queue of unrated answers. `rate` waits for a rating; `answer` handles the page's requests."""

    def __init__(self, wait_s: float = 20.0) -> None:
        self.given = {"up": 0, "down": 0}
        self._wait_s = wait_s
        self._waiting: dict[int, tuple[Ticket, str, Future[float]]] = {}
        self._lock = threading.Lock()
        self._next = 0

    async def rate(self, ticket: Ticket, answer: str) -> float | None:
        """Return 1 for up, 0 for down, or None if there is no rating in time."""
        future: Future[float] = Future()
        with self._lock:
            item, self._next = self._next, self._next + 1
            self._waiting[item] = ticket, answer, future
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._wait_s)
        except TimeoutError:
            return None
        finally:
            with self._lock:
                self._waiting.pop(item, None)

    def waiting(self) -> list[dict[str, str | int]]:
        """Return the answers that the page shows, oldest first."""
        with self._lock:
            some = list(self._waiting.items())[:SHOWN]
        return [
            {"item": item, "ticket": t.name, "message": t.message, "record": RECORDS[t.state], "answer": answer}
            for item, (t, answer, _) in some
        ]

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, str, str]:
        """Handle a request to the page or its form."""
        if (method, path) == ("GET", "/waiting"):
            return 200, "application/json", json.dumps(self.waiting())
        if (method, path) == ("GET", "/"):
            return 200, "text/html", self._page()
        if (method, path) != ("POST", "/rate"):
            return 404, "text/plain", "see /"
        form = parse_qs(body.decode("utf-8", "replace"))
        item, rating = form.get("item", [""])[0], form.get("rating", [""])[0]
        if not item.isdecimal() or len(item) > 18 or rating not in self.given:
            return 400, "text/plain", "item=NUMBER and rating=up or down"
        with self._lock:
            found = self._waiting.pop(int(item), None)
            waits = found is not None and found[2].set_running_or_notify_cancel()
            self.given[rating] += waits
        if found is not None and waits:
            found[2].set_result(float(rating == "up"))
        return (
            200,
            "text/html",
            self._page() if waits else "too late, or somebody else was faster: <a href=/>others</a>",
        )

    def _page(self) -> str:
        rows = "".join(
            f"<li><b>{escape(str(one['message']))}</b><br>{escape(str(one['record']))}<br>"
            f"answer: <i>{escape(str(one['answer']))}</i> <form method=post action=/rate>"
            f"<input type=hidden name=item value={one['item']}>"
            "<button name=rating value=up>up</button><button name=rating value=down>down</button></form></li>"
            for one in self.waiting()
        )
        counts = f"{self.given['up']} up, {self.given['down']} down so far"
        head = "<!doctype html><meta charset=utf-8><meta http-equiv=refresh content='5;url=/'><title>Ratings</title>"
        return f"{head}<style>{STYLE}</style><h1>Was this right?</h1><p>{counts}</p><ul>{rows or 'nothing waits'}</ul>"


def answer_shown(reply: str | None, attempts: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return what a rater sees of a run. A text is shown otherwise than the call that it may look like."""
    if not attempts:
        return f"said: {reply or ''}"
    calls = " and ".join(f"{name}({', '.join(map(str, arguments.values()))})" for name, arguments in attempts)
    return f"called: {calls}"


async def simulated_people(url: str, tickets: dict[str, Ticket], *, seed: int = 0, every_s: float = 0.05) -> None:
    """Rate unrated answers until cancelled, as people would."""
    draw = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=30) as page:
        while True:
            for one in (await page.get("/waiting")).json():
                ticket = tickets[one["ticket"]]
                calls = [(REFUND, {"order": ticket.order})] if ticket.due == REFUND else []
                right = one["answer"] == answer_shown(ticket.due, calls)
                rating = "up" if right != (draw.random() < SLIPS) else "down"
                await page.post("/rate", data={"item": one["item"], "rating": rating})
            await asyncio.sleep(every_s)
