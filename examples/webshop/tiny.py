"""What a tiny model knows before it learns: how the shop is used, and little of what the instruction asks for.

Demonstrations look for the wanted kind, open any of the products, choose values of most options, and buy. A value is
the one that was asked for with a chance of SHARE, else any.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

from examples import group_learning
from examples.tiny_model import Demonstration, Recipe
from examples.webshop.catalogue import GOALS, make_catalogue
from examples.webshop.world import Session, Shop

PROMPT = "shop"
SEARCHES = "search[words]"
STEPS, BATCH = 560, 24
SHORT = 330  # steps with the search alone: in them it learns to copy words of the instruction
DEMONSTRATIONS = STEPS * BATCH
FIRST = GOALS  # goals of demonstrations are numbered from here: none of them is a task
SKIPPED = 0.2  # share of options that a demonstration leaves alone
SHARE = 0.3  # chance that a value is the one that was asked for
CONTEXT = 2048
ENGINE = {"max_model_len": CONTEXT}
TRAINER = group_learning.TRAINER
LEARN = group_learning.LEARN


def loop_recipe() -> Recipe:
    """The model of the plain loop."""
    return _recipe(_as_text, has_tools=False)


def tools_recipe() -> Recipe:
    """The model of the OpenAI Agents SDK's shopper."""
    return _recipe(_as_tools, has_tools=True)


def _recipe(form: Any, *, has_tools: bool) -> Recipe:
    draw = random.Random(11)
    shop = Shop(make_catalogue(goals=FIRST + DEMONSTRATIONS))
    lengths = [1] * (SHORT * BATCH) + [None] * ((STEPS - SHORT) * BATCH)
    shown = [form(shop.session(str(FIRST + n)), draw, length) for n, length in enumerate(lengths)]
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


def visit(session: Session, draw: random.Random) -> Iterator[tuple[str, str, str]]:
    """A visit in the demonstrations' way: verb, argument and the page that follows, step by step."""
    wanted = session.goal
    attribute = f"{next(iter(wanted.attributes))} " if draw.random() < 0.5 else ""
    words = attribute + wanted.kind
    yield "search", words, session.search(words).text
    place = str(draw.randint(1, len(session.shown)))
    yield "click", place, session.click(place).text
    options = session.product.options if session.product is not None else {}
    for name, values in options.items():
        if draw.random() >= SKIPPED:
            asked = wanted.options.get(name)
            value = asked if draw.random() < SHARE and asked in values else draw.choice(values)
            yield "click", value, session.click(value).text
    yield "click", "buy now", session.click("buy now").text


def _as_text(session: Session, draw: random.Random, length: int | None) -> Demonstration:
    """The first actions of a visit, or all of them."""
    messages = [
        {"role": "system", "content": PROMPT},
        {"role": "user", "content": f"{session.goal.instruction}\n{SEARCHES}"},
    ]
    for verb, argument, page in islice(visit(session, draw), length):
        messages += [
            {"role": "assistant", "content": f"{verb}[{argument}]"},
            {"role": "user", "content": page},
        ]
    return Demonstration(messages[:-1])


def _as_tools(session: Session, draw: random.Random, length: int | None) -> Demonstration:
    """The first actions of a visit, or all of them."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": PROMPT},
        {"role": "user", "content": session.goal.instruction},
    ]
    for verb, argument, page in islice(visit(session, draw), length):
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
    """The words of a demonstration, for the tokenizer."""
    rows = []
    for message in demonstration.messages:
        calls = [f"{c['function']['name']} {c['function']['arguments']}" for c in message.get("tool_calls", [])]
        rows.append("\n".join([message["role"], message["content"], *calls]))
    return "\n".join(rows)
