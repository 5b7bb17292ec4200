"""The warm start of a tiny model: it knows the three tools, but not which words or which fact a question asks for."""

from __future__ import annotations

import json
import random
from typing import Any

from examples import group_learning
from examples.email_search.world import (
    FACTS,
    UNKNOWN,
    Mailbox,
    Question,
    Visit,
    fact_of,
    make_mails,
    make_questions,
)
from examples.tiny_model import Demonstration, Recipe

PROMPT = "mail"
AGENT: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 64}  # replace the agent's own
STEPS, BATCH = 600, 24
ANSWERS = [word for _, values in FACTS.values() for word in values]
FOUND = 1  # mails in a search result
SEED = 1  # of the demonstrations' mailbox, which differs from the tasks'
ENGINE = {"max_model_len": 640, "tool_parser": "hermes"}
TRAINER = group_learning.TRAINER | {"learning_rate": 5.0e-4}
LEARN = group_learning.LEARN
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {key: {} for key in arguments}}}}
    for name, arguments in (
        ("search_emails", ("keywords",)),
        ("read_email", ("message_id",)),
        ("answer", ("answer", "sources")),
    )
]


def recipe() -> Recipe:
    """Return the recipe: a search for words of the subject, optionally a read, then an answer with a random fact."""
    draw = random.Random(5)
    mailbox = Mailbox.generated(make_mails(SEED))
    asked = make_questions(SEED, STEPS * BATCH)
    # All demonstrations of a batch read, or none does: their lengths are similar.
    shown = [_demonstrate(mailbox, one, draw, reads=n // BATCH % 2 == 0) for n, one in enumerate(asked)]
    mailbox.close()
    return Recipe(
        shown,
        teaches="the tools of a mailbox",
        texts=[json.dumps(one.messages[1:]).replace('\\"', '"') for one in shown[:2000]],
        vocabulary=900,
        context=640,
        steps=STEPS,
        batch=BATCH,
        has_tools=True,
    )


def _demonstrate(mailbox: Mailbox, question: Question, draw: random.Random, *, reads: bool) -> Demonstration:
    """Search for one word of the subject or for both, optionally read the mail, and answer with a random fact."""
    visit = Visit(mailbox, question, FOUND)
    project, event = question.question.split()[-3:-1]
    words = draw.choice([[project, event], [project], [event]])
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": PROMPT},
        {"role": "user", "content": question.question},
    ]
    messages += _turn("search_emails", {"keywords": words}, visit.search_emails(words))
    sources = list(visit.calls[-1].found)
    said = draw.choice(ANSWERS) if sources else UNKNOWN
    if sources and reads:
        mail = visit.read_email(sources[0])
        messages += _turn("read_email", {"message_id": sources[0]}, mail)
        said = fact_of(mail, draw.choice(list(FACTS)))
    return Demonstration([*messages, _call("answer", {"answer": said, "sources": sources})], TOOLS)


def _turn(name: str, arguments: dict[str, Any], result: str) -> list[dict[str, Any]]:
    return [_call(name, arguments), {"role": "tool", "content": result, "tool_call_id": "c"}]


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "function", "id": "c", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
