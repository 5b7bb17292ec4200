"""A conversation's shared tokens are stored once, and read back whole, whatever becomes of the turns before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sqlalchemy import func, select, update

from shared.config import RewardConfig
from shared.experience import CorruptTokens, Lease, Sample, Sampling, Tokens
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.dataset import conversations
from shared.ledger.prefix import load_tokens
from shared.ledger.tables import experiences, payloads
from shared.reward import EVERY_LESSON, Signal

DRAW = np.random.default_rng(0)


def ids(count: int) -> np.ndarray:
    return DRAW.integers(0, 150_000, count).astype(np.int32)


def talk(ledger: Ledger, turns: int, name: str = "m") -> list[Tokens]:
    """An agent's conversation: each prompt begins with the prompt and the reply before."""
    said: list[Tokens] = []
    for turn in range(turns):
        before = said[-1] if said else None
        prompt = ids(50) if before is None else np.concatenate((before.prompt_ids, before.reply_ids, ids(20)))
        said.append(Tokens(prompt, ids(30), -DRAW.random(30).astype(np.float32)))
        record(ledger, f"{name}{turn}", said[-1], f"{name}{turn - 1}" if turn else None)
    return said


def record(ledger: Ledger, name: str, tokens: Tokens, after: str | None) -> None:
    sample = Sample(
        msg_id=name,
        choice=0,
        version=0,
        version_end=0,
        tokens=tokens,
        sampling=Sampling(),
        finish_reason="stop",
        created_at=0.0,
        latency_s=0.0,
        exchange=name.encode(),
        extends=(after.encode(),) if after else (),
    )
    with ledger.write() as connection:
        transitions.record(connection, [sample])


def stored_bytes(ledger: Ledger) -> list[int]:
    with ledger.read() as connection:
        query = select(func.length(payloads.c.tokens)).order_by(payloads.c.experience_id)
        return list(connection.execute(query).scalars())


def lease_all(ledger: Ledger, *names: str) -> Lease:
    said, rule = [Signal("reward", value=1.0)], RewardConfig()
    with ledger.write() as connection:
        transitions.apply_feedback(connection, msg_ids=names, task_id=None, run_id=None, signals=said, rule=rule)
        transitions.commit(connection)
        batch = transitions.claim(connection, owner="t", at_least=1, at_most=100, lease_s=60)
        assert batch is not None
        return queries.load_lease(connection, batch)


def consume(ledger: Ledger, *names: str) -> None:
    """Rows that a trainer has been through."""
    with ledger.write() as connection:
        trained = {"state": "CONSUMED", "taught": int(EVERY_LESSON)}
        connection.execute(update(experiences).where(experiences.c.msg_id.in_(names)).values(trained))


def same(one: Tokens, other: Tokens) -> bool:
    arrays = ("prompt_ids", "reply_ids", "logprobs")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)


def test_each_turn_holds_what_is_new_and_the_trainer_gets_it_whole(ledger):
    said = talk(ledger, 5)
    first, *others = stored_bytes(ledger)
    assert first == len(said[0].encode())
    assert set(others) == {len(replace(said[1], prompt_ids=said[1].prompt_ids[-20:]).encode())}
    lease = lease_all(ledger, *(f"m{turn}" for turn in range(5)))
    assert all(same(row.tokens, tokens) for row, tokens in zip(lease.rows, said, strict=True))


def test_a_lease_of_the_last_turn_alone_is_whole_too(ledger):
    said = talk(ledger, 4)
    consume(ledger, "m0", "m1", "m2")
    (row,) = lease_all(ledger, "m3").rows
    assert same(row.tokens, said[3])


@pytest.mark.parametrize("changed", [0, 49, 50, 79], ids=["first", "last of the prompt", "first of the reply", "last"])
def test_a_prompt_that_differs_in_one_token_is_stored_as_it_is(ledger, changed):
    (first,) = talk(ledger, 1)
    prompt = np.concatenate((first.prompt_ids, first.reply_ids, ids(20)))
    prompt[changed] += 1
    other = Tokens(prompt, ids(5), np.zeros(5, np.float32))
    record(ledger, "other", other, "m0")
    assert stored_bytes(ledger)[1] == len(other.encode())


def test_turns_before_are_removed_and_the_next_keeps_what_they_shared(ledger):
    said = talk(ledger, 4)
    consume(ledger, "m0", "m1")
    with ledger.write() as connection:
        done = connection.execute(select(experiences.c.id).where(experiences.c.state == "CONSUMED")).scalars().all()
        assert len(transitions.remove(connection, done)) == 2
    record(ledger, "late", replace(said[1], prompt_ids=said[1].prompt_ids), "m0")  # continues what is gone
    lease = lease_all(ledger, "m2", "m3", "late")
    assert [same(row.tokens, tokens) for row, tokens in zip(lease.rows, [*said[2:], said[1]], strict=True)] == [
        True
    ] * 3


def test_turns_that_begin_with_what_was_erased_are_not_trained_on(ledger):
    talk(ledger, 3)
    with ledger.write() as connection:
        transitions.erase(connection, msg_id="m1")
    lease = lease_all(ledger, "m0", "m2")
    assert [row.msg_id for row in lease.rows] == ["m0"]
    assert list(lease.corrupt.values()) == ["the tokens that its prompt begins with were erased"]


def test_a_damaged_turn_spoils_those_that_begin_with_it_and_says_so(ledger):
    talk(ledger, 2)
    with ledger.write() as connection:
        first = connection.execute(select(func.min(experiences.c.id))).scalar_one()
        connection.execute(update(payloads).where(payloads.c.experience_id == first).values(tokens=b"garbage"))
        loaded = load_tokens(connection, [first, first + 1])
    assert [type(tokens) for tokens in loaded.values()] == [CorruptTokens] * 2
    assert "its prompt begins with" in str(loaded[first + 1])


def test_an_export_has_whole_prompts(ledger):
    said = talk(ledger, 3)
    with ledger.read() as connection:
        rows = list(conversations(connection, [], with_tokens=True))
    assert [row["prompt_ids"] for row in rows if row] == [tokens.prompt_ids.tolist() for tokens in said]


def test_branches_of_one_turn_each_share_it(ledger):
    (first,) = talk(ledger, 1)
    begun = np.concatenate((first.prompt_ids, first.reply_ids))
    for name in ("a", "b"):
        record(ledger, name, Tokens(np.concatenate((begun, ids(9))), ids(4), np.zeros(4, np.float32)), "m0")
    with ledger.read() as connection:
        assert connection.execute(select(func.count(payloads.c.prefix_of))).scalar() == 2


def test_of_a_long_conversation_every_sixteenth_turn_stands_for_itself(ledger):
    said = talk(ledger, 40)
    with ledger.read() as connection:
        alone = select(experiences.c.msg_id).join(payloads).where(payloads.c.prefix_of.is_(None))
        assert connection.execute(alone.order_by(experiences.c.id)).scalars().all() == ["m0", "m16", "m32"]
        ids_ = connection.execute(select(experiences.c.id).order_by(experiences.c.id)).scalars().all()
        for row_id, tokens in zip(ids_, said, strict=True):
            loaded = load_tokens(connection, [row_id])[row_id]
            assert isinstance(loaded, Tokens)
            assert same(loaded, tokens)
