"""What a tiny model knows before it learns: the three tools, and nothing of which words or which fact are asked for."""

from __future__ import annotations

import json
import random
from typing import Any

from examples import group_learning
from examples.email_search.world import FACTS, Mailbox, Question, Visit, fact_of, make_mails, make_questions
from examples.tiny_model import Demonstration, Recipe

PROMPT = "mail"
DEMONSTRATIONS = 4000
FOUND = 1  # mails that a search shows
SEED = 1  # of the mailbox of the demonstrations, which is another
ENGINE = {"max_model_len": 640, "tool_parser": "hermes"}
TRAINER = group_learning.TRAINER
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
    """Questions answered with any fact of the mail that was found, after a search for some words."""
    draw = random.Random(5)
    mailbox = Mailbox.generated(make_mails(SEED))
    shown = [_demonstrate(mailbox, question, draw) for question in make_questions(SEED, DEMONSTRATIONS)]
    mailbox.close()
    return Recipe(
        shown,
        teaches="the tools of a mailbox",
        texts=[json.dumps(one.messages[1:]).replace('\\"', '"') for one in shown[:2000]],
        vocabulary=900,
        context=640,
        steps=300,
        batch=20,
        has_tools=True,
    )


def _demonstrate(mailbox: Mailbox, question: Question, draw: random.Random) -> Demonstration:
    """Searches for the whole subject or for one word of it, reads, and answers any of the facts."""
    visit = Visit(mailbox, question, FOUND)
    subject = question.question.split()[-3:-1]
    words = subject if draw.random() < 0.5 else [draw.choice(subject)]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": PROMPT},
        {"role": "user", "content": question.question},
    ]
    messages += _turn("search_emails", {"keywords": words}, visit.search_emails(words))
    sources = list(visit.calls[-1].found)
    said = "I don't know"
    if sources:
        mail = visit.read_email(sources[0])
        messages += _turn("read_email", {"message_id": sources[0]}, mail)
        said = fact_of(mail, draw.choice(list(FACTS)))
    return Demonstration([*messages, _call("answer", {"answer": said, "sources": sources})], TOOLS)


def _turn(name: str, arguments: dict[str, Any], result: str) -> list[dict[str, Any]]:
    return [_call(name, arguments), {"role": "tool", "content": result, "tool_call_id": "c"}]


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "function", "id": "c", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
