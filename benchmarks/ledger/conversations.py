"""Conversations of ten turns: with shared tokens stored once, and with each prompt stored whole."""

from __future__ import annotations

import time
from dataclasses import replace
from unittest.mock import patch

import numpy as np
from sqlalchemy import select

from benchmarks.ledger.databases import WRITERS, Databases, Figures, make_sample, size_of, tidy
from shared.experience import Sample
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.prefix import load_tokens, share_prefix
from shared.ledger.tables import experiences

TURNS, FIRST_PROMPT, TOLD = 10, 300, 100  # tokens of the first prompt, and tokens added before each next turn


def measure(databases: Databases, kind: str, agents: int = 400) -> Figures:
    """Ten linked turns each: with shared tokens stored once, and with each prompt stored whole."""
    result: Figures = {}
    for name, keeps in (
        ("shared", share_prefix),
        ("whole", lambda _connection, turns: [(turn, None) for turn, _ in turns]),
    ):
        with patch("shared.ledger.transitions.record.share_prefix", keeps):
            result |= {f"{figure}_{name}": value for figure, value in _talk(databases, kind, agents).items()}
    return result


def _talk(databases: Databases, kind: str, agents: int) -> Figures:
    ledger = databases.open(kind)
    last: list[Sample | None] = [None] * agents
    took = 0.0
    for _ in range(TURNS):
        turns = [_next_turn(before) for before in last]
        for start in range(0, agents, WRITERS):  # in groups, as a busy explorer commits
            started = time.perf_counter()
            with ledger.write() as connection:
                transitions.record(connection, turns[start : start + WRITERS])
            took += time.perf_counter() - started
        last = [*turns]
    tidy(ledger)
    rows = agents * TURNS
    result = {"bytes_a_turn": size_of(ledger) / rows, "turns_per_s": rows / took, "read_ms_of_64": _read_ms(ledger)}
    ledger.close()
    return result


def _next_turn(before: Sample | None) -> Sample:
    if before is None:
        return make_sample(FIRST_PROMPT)
    new = make_sample(TOLD)
    prompt = np.concatenate((before.tokens.prompt_ids, before.tokens.reply_ids, new.tokens.prompt_ids))
    assert before.exchange is not None
    return replace(new, tokens=replace(new.tokens, prompt_ids=prompt), extends=(before.exchange,))


def _read_ms(ledger: Ledger) -> float:
    """Time to read the tokens of the last turns of 64 conversations; their other turns are not read."""
    with ledger.read() as connection:
        newest = select(experiences.c.id).order_by(experiences.c.id.desc()).limit(64)
        ids = connection.execute(newest).scalars().all()
        started = time.perf_counter()
        for _ in range(10):
            load_tokens(connection, ids)
        return 100 * (time.perf_counter() - started)
