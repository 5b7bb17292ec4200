"""The demo's models: the demonstrations of their warm starts, for examples.tiny_model.

The base model learns the format and the departments, which a pretrained model would know. It does not learn to which of
a department's four desks a ticket belongs, nor its priority: both targets are random. The follower answers with the
desk and the priority of a hint, a message before the ticket, and ignores the ticket. The teacher's targets are right.
All models have the same tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from examples.support_desk import agent, desk
from examples.tiny_model import Demonstration, Progress, Recipe, folder_of, tiny_model

SEED = 20
STEPS = 220
FOLLOWING = 1000  # steps that teach to follow hints
TEACHING = 600  # steps of the teacher
BATCH = 64
WORDING = (
    "right\n{text}"  # how the trainer tells a teacher of a comment; a line of its own has the same tokens anywhere
)


def base_model(progress: Progress) -> Path:
    """Return the model's folder. Makes the model if it is not cached. progress(step, fraction done)."""
    return tiny_model(recipe, folder_of("support_desk"), progress)


def follower(progress: Progress) -> Path:
    """Return the folder of a base model that follows hints."""
    return tiny_model(followers_recipe, folder_of("support_desk", "follower"), progress)


def teacher(progress: Progress) -> Path:
    """Return the folder of a model that gives right answers."""
    return tiny_model(teachers_recipe, folder_of("support_desk", "teacher"), progress)


def misled_teacher(progress: Progress) -> Path:
    """Return the folder of a control: a model that answers each ticket with another ticket's right answer."""
    return tiny_model(misled_teachers_recipe, folder_of("support_desk", "misled-teacher"), progress)


def recipe() -> Recipe:
    """Return the recipe: tickets whose targets are right only in the department."""
    draw = random.Random(SEED + 1)
    return Recipe(
        demonstrations=[_demonstration(draw) for _ in range(STEPS * BATCH)],
        teaches="the format and the departments",
        texts=_texts(),
        steps=STEPS,
        batch=BATCH,
        seed=SEED,
        as_served=False,  # all but a few of its words have the same tokens either way
    )


def followers_recipe() -> Recipe:
    """Return the base model's recipe, extended by tickets of which every other one follows a hint."""
    draw, plain = random.Random(SEED + 2), recipe()
    hinted = [(_demonstration, _hinted)[n % 2](draw) for n in range(FOLLOWING * BATCH)]
    shown = [*plain.demonstrations, *hinted]
    return replace(plain, demonstrations=shown, steps=STEPS + FOLLOWING, teaches="to do what a hint says")


def teachers_recipe() -> Recipe:
    """Return the recipe: tickets with their right answers."""
    tickets = _teachers_tickets()
    return _taught(zip(tickets, tickets, strict=True), "the right answers, to a teacher")


def misled_teachers_recipe() -> Recipe:
    """Return the recipe: the same tickets and answers, each answer with another ticket."""
    tickets = _teachers_tickets()
    return _taught(zip(tickets, [*tickets[1:], tickets[0]], strict=True), "answers to other tickets, to a teacher")


def hint(some_desk: str, priority: str) -> dict[str, str]:
    """Return the message with which the trainer passes a comment to a teacher, in the demo's wording."""
    return {"role": "system", "content": WORDING.format(text=desk.format_answer(some_desk, priority)) + "\n"}


def _texts() -> list[str]:
    draw, texts = random.Random(SEED), []
    for _ in range(6000):
        ticket = desk.write_ticket(draw)
        answer = desk.format_answer(ticket.desk, ticket.priority)
        texts.append(f"system\n{agent.INSTRUCTION}\nuser\n{ticket.text}\nassistant\n{answer}")
    return texts


def _teachers_tickets() -> list[desk.Ticket]:
    draw = random.Random(SEED + 3)
    return [desk.write_ticket(draw) for _ in range(TEACHING * BATCH)]


def _taught(pairs: Iterable[tuple[desk.Ticket, desk.Ticket]], what: str) -> Recipe:
    """Return the recipe: for each pair, the first ticket with the answer to the second."""
    shown = [_answered(ticket, answered.desk, answered.priority) for ticket, answered in pairs]
    return replace(recipe(), demonstrations=shown, steps=TEACHING, teaches=what)


def _demonstration(draw: random.Random) -> Demonstration:
    ticket = desk.write_ticket(draw)
    some_desk = draw.choice(tuple(desk.DEPARTMENTS[desk.DESKS[ticket.desk]]))
    return _answered(ticket, some_desk, draw.choice(tuple(desk.PRIORITIES)))


def _hinted(draw: random.Random) -> Demonstration:
    ticket, named = desk.write_ticket(draw), (draw.choice(tuple(desk.DESKS)), draw.choice(tuple(desk.PRIORITIES)))
    return Demonstration([hint(*named), *_answered(ticket, *named).messages])


def _answered(ticket: desk.Ticket, some_desk: str, priority: str) -> Demonstration:
    answer = {"role": "assistant", "content": desk.format_answer(some_desk, priority)}
    return Demonstration([*agent.messages(ticket.text), answer])
