"""The warm start of a tiny model: it can use the shop, but meets little of what the instruction asks for.

Demonstrations search for the wanted kind, open a random product, choose values of all options or of none, and buy. A
value is the wanted one with probability SHARE, else random.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from examples import group_learning
from examples.tiny_model import Demonstration, Recipe
from examples.webshop.catalogue import GOALS, Goal, make_catalogue
from examples.webshop.world import Session, Shop

PROMPT = "shop"
LOOP: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24}  # replace the agents' own
TOOLS: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 48}
SEARCHES = "search[words]"
BATCH = 24
# Steps with a search for a part of the instruction, to learn to copy; then visits that choose all options; then visits
# of which a fraction chooses none.
PIECES, CHOOSING, VISITS = 300, 150, 80
STEPS = PIECES + CHOOSING + VISITS
Steps = Iterator[tuple[str, str, str]]  # verb, argument, and the page that follows
DEMONSTRATIONS = STEPS * BATCH
FIRST = GOALS  # first goal number of the demonstrations, above those of all tasks
BUYS = 0.8  # fraction of the last visits that buy without any option
SHARE = 0.5  # probability that a value is the wanted one; else it is random
CONTEXT = 2048
ENGINE = {"max_model_len": CONTEXT}
TRAINER = group_learning.TRAINER
LEARN = group_learning.LEARN


def loop_recipe() -> Recipe:
    """Return the recipe for the shopper with the plain loop."""
    return _recipe(_as_text, has_tools=False)


def tools_recipe() -> Recipe:
    """Return the recipe for the shopper with the OpenAI Agents SDK."""
    return _recipe(_as_tools, has_tools=True)


def _recipe(form: Any, *, has_tools: bool) -> Recipe:
    draw = random.Random(11)
    shop = Shop(make_catalogue(goals=FIRST + DEMONSTRATIONS))
    ways = [_search] * PIECES + [_choosing] * CHOOSING + [visit] * VISITS
    sessions = [shop.session(str(FIRST + number)) for number in range(DEMONSTRATIONS)]
    shown = [form(ways[number // BATCH](one, draw), one.goal) for number, one in enumerate(sessions)]
    return Recipe(
        shown,
        teaches="how the shop is used",
        texts=[_plain(one) for one in shown[-2000:]],
        vocabulary=900,
        context=CONTEXT,
        steps=STEPS,
        batch=BATCH,
        has_tools=has_tools,
    )


def _search(session: Session, draw: random.Random) -> Steps:
    """Search for a part of the instruction, or for the wanted kind."""
    said = session.goal.instruction.split()
    first = draw.randrange(len(said) - 1)
    piece = " ".join(said[first : draw.randint(first + 2, len(said))])
    words = _kind(session, draw) if draw.random() < 0.3 else piece
    yield "search", words, session.search(words).text


def _kind(session: Session, draw: random.Random) -> str:
    """Return the wanted kind, in half of the cases with its attribute."""
    attribute = f"{next(iter(session.goal.attributes))} " if draw.random() < 0.5 else ""
    return attribute + session.goal.kind


def _choosing(session: Session, draw: random.Random, buys: float = 0.0) -> Steps:
    """Visit the shop step by step. buys: probability of buying without choosing options."""
    wanted, words = session.goal, _kind(session, draw)
    yield "search", words, session.search(words).text
    place = str(draw.randint(1, len(session.shown)))
    yield "click", place, session.click(place).text
    options = session.product.options if session.product is not None and draw.random() >= buys else {}
    for name, values in options.items():
        asked = wanted.options.get(name)
        value = asked if draw.random() < SHARE and asked in values else draw.choice(values)
        yield "click", f"{name} {value}", session.click(value).text
    yield "click", "buy now", session.click("buy now").text


def visit(session: Session, draw: random.Random) -> Steps:
    """Visit the shop as the last demonstrations do."""
    yield from _choosing(session, draw, BUYS)


def _as_text(steps: Steps, goal: Goal) -> Demonstration:
    messages = [
        {"role": "system", "content": PROMPT},
        {"role": "user", "content": f"{goal.instruction}\n{SEARCHES}"},
    ]
    for verb, argument, page in steps:
        messages += [
            {"role": "assistant", "content": f"{verb}[{argument}]"},
            {"role": "user", "content": page},
        ]
    return Demonstration(messages[:-1])


def _as_tools(steps: Steps, goal: Goal) -> Demonstration:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": PROMPT},
        {"role": "user", "content": goal.instruction},
    ]
    for verb, argument, page in steps:
        call = {"name": verb, "arguments": {"words" if verb == "search" else "label": argument}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "c", "function": call}]},
            {"role": "tool", "content": page, "tool_call_id": "c"},
        ]
    tools = [_tool("search", "words"), _tool("click", "label")]
    return Demonstration(messages[:-1], tools)


def _tool(name: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _plain(demonstration: Demonstration) -> str:
    """Return the words of a demonstration, for the tokenizer."""
    rows = []
    for message in demonstration.messages:
        calls = [f"{c['function']['name']} {c['function']['arguments']}" for c in message.get("tool_calls", [])]
        rows.append("\n".join([message["role"], message["content"], *calls]))
    return "\n".join(rows)
