"""The world of the demo: desks, what customers write, and how satisfied they are with an answer.

36 desks in 9 departments, 3 priorities. A ticket names its matter in one of several words, in one of many frames, with
or without a greeting, and shows its urgency by another phrase. Deterministic from a random generator. Knows nothing of
models or HTTP.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

# department → desk → what its tickets are about
DEPARTMENTS: dict[str, dict[str, tuple[str, ...]]] = {
    "billing": {
        "refunds": ("refund", "chargeback", "reimbursement"),
        "invoices": ("invoice", "receipt", "statement"),
        "payments": ("card payment", "direct debit", "bank transfer"),
        "pricing": ("price", "discount", "voucher"),
    },
    "shipping": {
        "tracking": ("tracking number", "parcel", "courier"),
        "customs": ("customs form", "import duty", "border check"),
        "returns": ("return label", "exchange", "sent-back item"),
        "pickup": ("pickup point", "locker", "collection slot"),
    },
    "account": {
        "passwords": ("password", "reset link", "passcode"),
        "profile": ("profile", "display name", "avatar"),
        "privacy": ("personal data", "data export", "consent"),
        "closing": ("account closure", "deletion request", "cancellation"),
    },
    "devices": {
        "phones": ("phone", "sim card", "handset"),
        "laptops": ("laptop", "keyboard", "trackpad"),
        "printers": ("printer", "toner", "paper tray"),
        "screens": ("monitor", "display panel", "docking cable"),
    },
    "network": {
        "wifi": ("wifi", "hotspot", "wireless signal"),
        "vpn": ("vpn", "tunnel", "remote login"),
        "email": ("mailbox", "inbox", "spam filter"),
        "hosting": ("website", "domain", "web server"),
    },
    "travel": {
        "flights": ("flight", "boarding pass", "layover"),
        "hotels": ("hotel room", "check-in desk", "suite"),
        "trains": ("train ticket", "rail pass", "platform"),
        "cars": ("rental car", "mileage", "fuel deposit"),
    },
    "people": {
        "payroll": ("salary", "payslip", "overtime"),
        "leave": ("vacation", "sick days", "parental leave"),
        "training": ("course", "certificate", "workshop"),
        "hiring": ("job offer", "interview", "application"),
    },
    "building": {
        "heating": ("radiator", "heating", "thermostat"),
        "lighting": ("lamp", "light switch", "bulb"),
        "elevators": ("elevator", "lift door", "escalator"),
        "parking": ("parking space", "garage gate", "permit"),
    },
    "legal": {
        "contracts": ("contract", "signature", "clause"),
        "claims": ("insurance claim", "damage report", "liability"),
        "patents": ("patent", "trademark", "license"),
        "audits": ("audit", "compliance check", "inspection"),
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
    """What a customer wrote, and what would have been right."""

    text: str
    desk: str
    priority: str


def write_ticket(random_: random.Random) -> Ticket:
    """One customer's words."""
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
    """The customer's reward in [0, 1]: mostly for the right desk, the rest for the right priority."""
    return DESK_REWARD * (desk == ticket.desk) + PRIORITY_REWARD * (priority == ticket.priority)


def format_answer(desk: str, priority: str) -> str:
    """How the agent is asked to answer."""
    return f"{desk} , {priority}"


def parse_answer(text: str) -> tuple[str | None, str | None]:
    """Desk and priority of an answer; None for a part that names nothing we have."""
    desk, _, priority = (part.strip() for part in text.lower().partition(","))
    return desk if desk in DESKS else None, priority if priority in PRIORITIES else None
