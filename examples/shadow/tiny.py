"""The warm start of a tiny model: it looks an order up, and refunds it or answers with a word, at random."""

from __future__ import annotations

import random
from typing import Any

from examples import group_learning
from examples.shadow.play import RUNS_PER_CALL
from examples.shadow.world import RECORDS, REFUND, REFUNDED, WORDS, Ticket, write_ticket
from examples.tiny_model import Demonstration, Recipe

PROMPT = "support"
AGENT: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 48}  # replace the agent's own
DEMONSTRATIONS = 6000
ENGINE = {"max_model_len": 384, "tool_parser": "hermes"}
TRAINER = group_learning.TRAINER | {
    "batch_size": 160,
    "max_staleness_versions": 6,
    "learning_rate": 5.0e-4,
    "grpo": group_learning.TRAINER["grpo"] | {"group_size": RUNS_PER_CALL, "group_timeout_s": 20.0},
}


def recipe() -> Recipe:
    """Return the recipe: conversations in which the action after the look-up is random."""
    draw = random.Random(3)
    shown = [_conversation(write_ticket(f"shown {number}"), draw) for number in range(DEMONSTRATIONS)]
    return Recipe(
        shown,
        teaches="to look up, to refund and to answer",
        vocabulary=900,
        context=384,
        steps=250,
        batch=32,
        has_tools=True,
    )


def _conversation(ticket: Ticket, draw: random.Random) -> Demonstration:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": PROMPT},
        {"role": "user", "content": ticket.message},
        _call("lookup", ticket.order),
        {"role": "tool", "content": RECORDS[ticket.state]},
    ]
    done = draw.choice([REFUND, *WORDS])
    if done == REFUND:
        messages += [_call(REFUND, ticket.order), {"role": "tool", "content": REFUNDED}]
    messages.append({"role": "assistant", "content": REFUNDED if done == REFUND else done})
    return Demonstration(messages, [_tool("lookup"), _tool(REFUND)])


def _call(name: str, order: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {"order": order}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "c", "function": function}]}


def _tool(name: str) -> dict[str, Any]:
    order = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}
    return {"type": "function", "function": {"name": name, "parameters": order}}
