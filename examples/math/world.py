"""Word problems with one operation, in twelve wordings, and the agents' calculator."""

from __future__ import annotations

import random
from typing import NamedTuple

NAMES = ("Ada", "Ben", "Eva", "Tom", "Mia", "Leo")
THINGS = ("apples", "books", "coins", "stamps", "shells", "cards")
WORDINGS: dict[str, tuple[str, ...]] = {
    "add": (
        "{name} has {a} {things} and gets {b} more. How many {things} now?",
        "There are {a} {things} on the table and {b} on the shelf. How many in all?",
        "{name} bought {a} {things} on Monday and {b} on Friday. How many altogether?",
    ),
    "subtract": (
        "{name} had {a} {things} and lost {b} of them. How many are left?",
        "Of {a} {things}, {name} gives {b} away. How many remain?",
        "{name} has {a} {things}, a friend has {b}. How many more has {name}?",
    ),
    "multiply": (
        "{name} fills {a} boxes with {b} {things} each. How many {things} is that?",
        "There are {a} rows of {b} {things}. How many {things} are there?",
        "{name} buys {a} bags, and every bag holds {b} {things}. How many {things} has {name}?",
    ),
    "divide": (
        "{name} shares {a} {things} evenly among {b} friends. How many does each get?",
        "{a} {things} are packed in boxes of {b}. How many boxes are needed?",
        "{name} splits {a} {things} into {b} equal piles. How many in each pile?",
    ),
}


class Problem(NamedTuple):
    """A question, its answer, and the operation and numbers that give it."""

    question: str
    answer: str
    operation: str
    a: int
    b: int


def make_problem(seed: int) -> Problem:
    """Make one problem. Its numbers and its answer are integers below 100."""
    draw = random.Random(f"math {seed}")
    operation = draw.choice(tuple(WORDINGS))
    low, high = draw.randint(2, 9), draw.randint(2, 9)
    a, b = {
        "add": (draw.randint(2, 49), draw.randint(2, 49)),
        "subtract": (low + draw.randint(2, 40), low),
        "multiply": (low, high),
        "divide": (low * high, low),
    }[operation]
    wording = draw.choice(WORDINGS[operation])
    question = wording.format(name=draw.choice(NAMES), things=draw.choice(THINGS), a=a, b=b)
    return Problem(question, calculate(operation, a, b), operation, a, b)


def calculate(operation: str, a: float, b: float) -> str:
    """Return the calculator's result. An error is returned as text, so that an agent can continue."""
    try:
        a, b = float(a), float(b)
        found = {
            "add": lambda: a + b,
            "subtract": lambda: a - b,
            "multiply": lambda: a * b,
            "divide": lambda: a / b,
        }[operation]()
    except KeyError:
        return f"error: the operations are {', '.join(WORDINGS)}"
    except (TypeError, ValueError, OverflowError):
        return "error: a and b are numbers"
    except ZeroDivisionError:
        return "error: nothing can be divided by 0"
    return f"{round(found, 2):.10g}"
