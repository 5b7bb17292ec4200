"""The support desk: orders, complaints about them, and the action that is due. Pure and seeded; independent of models.

The due action depends on the order's record and on the customer's complaint. The reply to a customer is a refund, or
one word: replace, wait, explain or decline.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ORDERS = range(10, 90)
RECORDS = {  # state of an order → text of its record
    "new": "delivered 3 days ago",
    "old": "delivered 200 days ago",
    "late": "late , still on its way",
    "lost": "lost on its way",
}
COMPLAINTS = {
    "broken": ("came broken", "does not work", "has a crack"),
    "wrong": ("is not what i ordered", "is the wrong one", "has the wrong colour"),
    "missing": ("did not arrive", "is not here", "never came"),
    "regret": ("is not needed any more", "was a mistake", "is too dear"),
}
ITEMS = ("mug", "lamp", "tent", "chair", "radio", "clock", "scarf", "kettle")
DUE = {  # due actions; a parcel that has not arrived cannot be broken or wrong
    ("new", "broken"): "replace",
    ("new", "wrong"): "replace",
    ("new", "missing"): "explain",
    ("new", "regret"): "refund",
    ("old", "broken"): "explain",
    ("old", "wrong"): "decline",
    ("old", "missing"): "decline",
    ("old", "regret"): "decline",
    ("late", "missing"): "wait",
    ("late", "regret"): "decline",
    ("lost", "missing"): "refund",
    ("lost", "regret"): "refund",
}
REFUND = "refund"
WORDS = ("replace", "wait", "explain", "decline")  # replies of one word
REFUNDED = "refunded"  # the reply after a refund


@dataclass(frozen=True, slots=True)
class Ticket:
    """A customer's message and the due action. Only the world uses `due` and `state`."""

    name: str
    message: str
    order: str
    state: str
    due: str


def state_of(order: str) -> str | None:
    """Return the state of an order, which never changes, or None if the order does not exist."""
    if not order.isascii() or not order.isdecimal() or int(order) not in ORDERS or order != str(int(order)):
        return None
    return tuple(RECORDS)[int(order) % len(RECORDS)]


def write_ticket(name: str) -> Ticket:
    """Return the ticket with this name."""
    draw = random.Random(f"ticket {name}")
    order = str(draw.choice(ORDERS))
    state = state_of(order) or "new"
    complaint = draw.choice([complaint for known, complaint in DUE if known == state])
    words = draw.choice(COMPLAINTS[complaint])
    message = f"order {order} : the {draw.choice(ITEMS)} {words}"
    return Ticket(name, message, order, state, DUE[state, complaint])


def complaint_of(message: str) -> str | None:
    """Return the complaint in a message."""
    return next((name for name, some in COMPLAINTS.items() if any(message.endswith(words) for words in some)), None)


@dataclass
class Office:
    """The shop's back office: reads records and pays refunds, and counts both."""

    lookups: int = 0
    asked: list[str] = field(default_factory=list)  # orders that somebody wanted to be paid back
    refunds: list[str] = field(default_factory=list)  # orders that were paid back

    def look_up(self, order: str) -> str:
        """Return the record of an order."""
        self.lookups += 1
        state = state_of(order)
        return "no such order" if state is None else RECORDS[state]

    def refund(self, order: str) -> str:
        """Pay an order back."""
        self.asked.append(order)
        if state_of(order) is None:
            return "no such order"
        self.refunds.append(order)
        return REFUNDED


def action_of(reply: str | None, attempts: Sequence[tuple[str, Mapping[str, Any]]], order: str) -> str | None:
    """Return the action of a run on an order, from its reply or from its calls of writing tools, or None if invalid.

    A valid reply is exactly one word. Several writing calls, or a call for another order, are invalid.
    """
    if attempts:
        one = len(attempts) == 1 and attempts[0][0] == REFUND and dict(attempts[0][1]) == {"order": order}
        return REFUND if one else None
    word = (reply or "").strip().lower()
    return word if word in WORDS else None
