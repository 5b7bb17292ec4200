"""The world of the demo: desks, customers' tickets, and their satisfaction with an answer.

There are 36 desks in 9 departments, and 3 priorities. A ticket names its subject with one of several words in one of
several sentences, optionally with a greeting. A separate phrase gives its urgency. A random generator determines the
ticket. This module is independent of models and HTTP.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

# department → desk → subjects of its tickets
DEPARTMENTS: dict[str, dict[str, tuple[str, ...]]] = {
    "billing": {
        "refunds": ("refund", "chargeback"),
        "invoices": ("invoice", "receipt"),
        "payments": ("card payment", "direct debit"),
        "pricing": ("price", "discount"),
    },
    "shipping": {
        "tracking": ("tracking number", "parcel"),
        "customs": ("customs form", "import duty"),
        "returns": ("return label", "exchange"),
        "pickup": ("pickup point", "locker"),
    },
    "account": {
        "passwords": ("password", "reset link"),
        "profile": ("profile", "display name"),
        "privacy": ("personal data", "data export"),
        "closing": ("account closure", "deletion request"),
    },
    "devices": {
        "phones": ("phone", "sim card"),
        "laptops": ("laptop", "keyboard"),
        "printers": ("printer", "toner"),
        "screens": ("monitor", "display panel"),
    },
    "network": {
        "wifi": ("wifi", "hotspot"),
        "vpn": ("vpn", "tunnel"),
        "email": ("mailbox", "inbox"),
        "hosting": ("website", "domain"),
    },
    "travel": {
        "flights": ("flight", "boarding pass"),
        "hotels": ("hotel room", "check-in desk"),
        "trains": ("train ticket", "rail pass"),
        "cars": ("rental car", "mileage"),
    },
    "people": {
        "payroll": ("salary", "payslip"),
        "leave": ("vacation", "sick days"),
        "training": ("course", "certificate"),
        "hiring": ("job offer", "interview"),
    },
    "building": {
        "heating": ("radiator", "heating"),
        "lighting": ("lamp", "light switch"),
        "elevators": ("elevator", "lift door"),
        "parking": ("parking space", "garage gate"),
    },
    "legal": {
        "contracts": ("contract", "signature"),
        "claims": ("insurance claim", "damage report"),
        "patents": ("patent", "trademark"),
        "audits": ("audit", "compliance check"),
    },
}
PRIORITIES: dict[str, tuple[str, ...]] = {
    "low": ("no hurry at all", "whenever you have time", "just curious", "it can wait", "not pressing"),
    "normal": ("please look into it", "by the end of the week", "as usual", "when it is my turn", "in the next days"),
    "urgent": (
        "this is an emergency",
        "right now please",
        "we are losing money",
        "i need it today",
        "everything stopped",
    ),
}
DESKS: dict[str, str] = {desk: department for department, desks in DEPARTMENTS.items() for desk in desks}

OPENINGS = ("", "", "hello", "hi there", "good morning", "dear team", "hey", "excuse me")
FRAMES = (
    "there is a problem with my {matter}",
    "i have a question about the {matter}",
    "the {matter} does not work",
    "can someone help me with a {matter}",
    "something is wrong with our {matter}",
    "i still wait for news on the {matter}",
    "who takes care of the {matter}",
    "my {matter} is not what i expected",
    "we were promised a {matter} and got none",
    "the {matter} has been a mess since monday",
)
CLOSINGS = ("", "", "", "thanks", "many thanks", "regards", "bye for now")

DESK_REWARD = 0.7
PRIORITY_REWARD = 0.3


@dataclass(frozen=True, slots=True)
class Ticket:
    """A customer's text, with the right desk and priority."""

    text: str
    desk: str
    priority: str


def write_ticket(random_: random.Random) -> Ticket:
    """Write one customer's ticket."""
    desk = random_.choice(tuple(DESKS))
    priority = random_.choice(tuple(PRIORITIES))
    matter = random_.choice(DEPARTMENTS[DESKS[desk]][desk])
    parts = [
        random_.choice(OPENINGS),
        random_.choice(FRAMES).format(matter=matter),
        random_.choice(PRIORITIES[priority]),
        random_.choice(CLOSINGS),
    ]
    return Ticket(" , ".join(part for part in parts if part), desk, priority)


def satisfaction(ticket: Ticket, desk: str | None, priority: str | None) -> float:
    """Return the customer's reward in [0, 1]: most of it for the right desk, the rest for the right priority."""
    return DESK_REWARD * (desk == ticket.desk) + PRIORITY_REWARD * (priority == ticket.priority)


def format_answer(desk: str, priority: str) -> str:
    """Return an answer in the agent's format."""
    return f"{desk} , {priority}"


def parse_answer(text: str) -> tuple[str | None, str | None]:
    """Return desk and priority of an answer, and None for a part that is not a known name."""
    desk, _, priority = (part.strip() for part in text.lower().partition(","))
    return desk if desk in DESKS else None, priority if priority in PRIORITIES else None
