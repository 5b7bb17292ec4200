"""The ledger against a simple model of it, step by step, in whatever order hypothesis thinks of. On both databases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from sqlalchemy import delete, select

from shared.config import RewardConfig
from shared.errors import LeaseLost
from shared.experience import Tokens
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import experiences, metadata
from shared.reward import SCORES, Lesson, Signal
from tests.support.forms import FULL
from tests.support.ledger_model import NOTHING, Batch, C, R, Row
from tests.support.samples import sample

OWNERS = st.sampled_from(["t1", "t2"])
TASKS = st.sampled_from([None, "a", "b"])
LEARNED = SCORES | {"comment"}


class LedgerMachine(RuleBasedStateMachine):
    """Every transition, on the ledger and on two dictionaries."""

    ledger: Ledger  # set by the test

    @initialize()
    def empty(self) -> None:
        with self.ledger.write() as connection:
            for table in reversed(metadata.sorted_tables):
                connection.execute(delete(table))
        self.rows: dict[str, Row] = {}
        self.batches: dict[int, Batch] = {}
        self.version = self.recorded = 0

    def _do(self, work: Any) -> Any:
        with self.ledger.write() as connection:
            return work(connection)

    def _states(self, *states: str) -> list[str]:
        return [name for name, row in self.rows.items() if row.state in states]

    def _record(self, task: str | None, before: str | None, count: int, reason: str | None = None) -> list[str]:
        """So many chats that continue one, or begin each for itself; one of seven has other tokens than that."""
        samples = []
        for _ in range(count):
            self.recorded += 1
            name = f"m{self.recorded:04}"
            extends = () if before is None else (before.encode(),)
            tokens = self._tokens(None if before is None else self.rows[before].tokens)
            about = {"task_id": task, "quarantine": reason, "version": self.version, "tokens": tokens}
            samples.append(sample(name, **about, exchange=name.encode(), extends=extends))
            conversation = name if before is None else self.rows[before].conversation
            self.rows[name] = Row(conversation, task, self.version, tokens, "DISCARDED" if reason else "RECORDED")
        self._do(lambda c: transitions.record(c, samples))
        return [one.msg_id for one in samples]

    def _tokens(self, before: Tokens | None) -> Tokens:
        new = np.arange(20, dtype=np.int32) + self.recorded
        prompt = new if before is None else np.concatenate((before.prompt_ids, before.reply_ids, new))
        if self.recorded % 7 == 0:
            prompt[0] += 1
        return Tokens(prompt, new[:9], np.full(9, -0.25, np.float32))

    @rule(task=TASKS, count=st.integers(1, 3), data=st.data(), quarantine=st.booleans())
    def record(self, task: str | None, count: int, data: Any, quarantine: bool) -> None:
        before = data.draw(st.sampled_from([None, *self.rows]))
        self._record(task, before, count, "broken" if quarantine else None)

    @rule(count=st.integers(2, 8), data=st.data())
    def a_busy_hour(self, count: int, data: Any) -> None:
        """Else there would seldom be more ready rows than a batch takes."""
        names = self._record(None, data.draw(st.sampled_from([None, *self.rows])), count)
        said = [Signal("reward", value=1.0)]
        about: dict[str, Any] = {"task_id": None, "run_id": None, "signals": said, "rule": RewardConfig()}
        self._do(lambda c: transitions.apply_feedback(c, msg_ids=names, **about))
        for name in names:
            self.rows[name].log(R, 1.0)
            self.rows[name].hear(R)
        self._commit()
        self._do(transitions.commit)

    def _commit(self, task: str | None = None) -> list[str]:
        """Trajectories that were spoken of become ready; a task without a run does not make one.

        Rows that were trained on come along for what is new about them, and where a reward is new to their trajectory.
        """
        reached: dict[str, Lesson] = {}
        for row in self._waiting():
            if task is None or row.task == task:
                reached[row.conversation] = reached.get(row.conversation, NOTHING) | row.teaches
        chosen = []
        for name in self._states("RECORDED", "CONSUMED"):
            row = self.rows[name]
            new = reached.get(row.conversation, NOTHING)
            if new and (row.state == "RECORDED" or row.teaches or new & R & ~row.taught):
                row.state = "READY"
                chosen.append(name)
        return chosen

    def _waiting(self) -> list[Row]:
        return [row for row in self.rows.values() if row.state in ("RECORDED", "CONSUMED") and row.teaches]

    @rule(data=st.data(), reward=st.sampled_from([None, 0.0, 0.5, 1.0]), everybody=st.booleans())
    def feedback(self, data: Any, reward: float | None, everybody: bool) -> None:
        """A reward, or a comment; both are learned from."""
        names = data.draw(st.lists(st.sampled_from([*self.rows, "nobody"]), min_size=1, max_size=4, unique=True))
        said = [Signal("comment", text="no") if reward is None else Signal("reward", value=reward)]
        lesson = C if reward is None else R
        about: dict[str, Any] = {"task_id": None, "run_id": None, "signals": said, "learned": LEARNED}
        about |= {"msg_ids": names, "rule": RewardConfig(), "conversations": everybody}
        receipts = self._do(lambda c: transitions.apply_feedback(c, **about))
        known = {name for name in names if name in self.rows}
        if everybody:
            reached = {self.rows[name].conversation for name in known}
            known |= {name for name, row in self.rows.items() if row.conversation in reached}
        assert {receipt.msg_id for receipt in receipts} == known | set(names)
        for receipt in receipts:
            row = self.rows.get(receipt.msg_id)
            if row is None:
                assert receipt.state == "unknown"
                continue
            may_act = row.may_act(lesson)
            if receipt.state != "duplicate":  # what was said before of the same scope changes nothing
                row.log(lesson, reward)
            if may_act:
                assert receipt.state in ("applied", "updated", "duplicate")
                assert receipt.state != "updated" or lesson is R or row.late
                if receipt.state != "duplicate":
                    row.hear(lesson)
            else:
                assert receipt.state == ("expired" if row.state == "DISCARDED" else "already_trained")

    @rule(task=TASKS)
    def commit(self, task: str | None) -> None:
        chosen = self._commit(task)
        committed, ready = self._do(lambda c: transitions.commit(c, task_id=task))
        assert (committed, ready) == (len(chosen), len(self._states("READY")))

    @rule(owner=OWNERS, at_least=st.integers(1, 4), at_most=st.integers(1, 5), is_late=st.booleans())
    def claim(self, owner: str, at_least: int, at_most: int, is_late: bool) -> None:
        trajectories: dict[str, list[str]] = {}
        for name in self._states("READY"):  # in the order of their first rows
            trajectories.setdefault(self.rows[name].conversation, []).append(name)
        expected: list[str] = []
        for names in trajectories.values():
            if len(expected) < at_most:
                expected += names
        lease_s = -1.0 if is_late else 86_400.0
        about = {"owner": owner, "at_least": at_least, "at_most": at_most, "lease_s": lease_s}
        batch = self._do(lambda c: transitions.claim(c, **about))
        if len(expected) < at_least:
            assert batch is None
            return
        with self.ledger.read() as connection:
            rows = queries.load_lease(connection, batch, kinds=["comment"]).rows
        assert [row.msg_id for row in rows] == sorted(expected)
        for row in rows:
            assert row.tokens.encode() == self.rows[row.msg_id].tokens.encode()
        self.batches[batch] = Batch(owner, expected, is_late)
        rewarded = self._rewarded(expected)
        for name in expected:
            row = self.rows[name]
            row.state, row.batch = "LEASED", batch
            row.acts = row.teaches | (R & ~row.taught if name <= rewarded.get(row.conversation, "") else NOTHING)
        for brought in rows:
            assert brought.acts == self.rows[brought.msg_id].acts
            assert {signal.kind for signal in brought.signals} <= ({"comment"} if brought.acts & C else set())
            assert brought.own_reward is None or brought.acts & R

    def _rewarded(self, names: list[str]) -> dict[str, str]:
        """By conversation the last row that a new reward of these acts on: its own, or of a whole any."""
        query = select(experiences.c.msg_id).where(experiences.c.outcome.is_not(None))
        of_wholes = set(self._do(lambda c: c.execute(query).scalars().all()))
        rewarded: dict[str, str] = {}
        for name in sorted(name for name in names if self.rows[name].teaches & R):
            last = "z" if name in of_wholes else name
            rewarded[self.rows[name].conversation] = max(last, rewarded.get(self.rows[name].conversation, ""))
        return rewarded

    @rule(owner=OWNERS, data=st.data())
    def publish(self, owner: str, data: Any) -> None:
        if not self.batches:
            return
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.batches)), min_size=1, max_size=2, unique=True))
        about: dict[str, Any] = {"parent": None, "kind": "full", "step": 1, "trainer": owner, "batch_ids": chosen}
        if any(self.batches[number].owner != owner for number in chosen):
            with pytest.raises(LeaseLost):
                self._do(lambda c: transitions.publish(c, version=self.version + 1, **about))
            return
        self.version += 1
        self._do(lambda c: transitions.publish(c, version=self.version, **about))
        for number in chosen:
            for name in self.batches.pop(number).names:
                row = self.rows[name]
                assert not row.acts & row.taught, "a lesson acted twice"
                row.state, row.taught = "CONSUMED", row.taught | row.acts
                row.consumed = row.consumed or self.version
                row.teaches &= ~row.acts

    @rule(owner=st.one_of(st.none(), OWNERS))
    def give_back(self, owner: str | None) -> None:
        chosen = [n for n, b in self.batches.items() if (b.expired if owner is None else b.owner == owner)]
        returned = [name for number in chosen for name in self.batches.pop(number).names]
        assert self._do(lambda c: transitions.give_back(c, owner=owner)) == len(returned)
        for name in returned:
            self.rows[name].state, self.rows[name].batch = "READY", None

    @rule(behind=st.integers(0, 2))
    def discard_stale(self, behind: int) -> None:
        stale = [n for n in self._states("READY") if self.version and self.rows[n].version < self.version - behind]
        assert self._do(lambda c: transitions.discard_stale(c, at_most_behind=behind)) == len(stale)
        for name in stale:
            row = self.rows[name]
            row.state, row.teaches = "DISCARDED" if row.consumed is None else "CONSUMED", NOTHING

    @rule()
    def expire(self) -> None:
        waiting = self._states("RECORDED")
        spoken_of = {row.conversation for row in self._waiting()}
        old = [n for n in waiting if self.rows[n].conversation not in spoken_of]
        assert self._do(lambda c: transitions.expire(c, before=1e12)) == len(old)
        for name in old:
            self.rows[name].state = "DISCARDED"

    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        trained = [name for name in self._states("CONSUMED") if not self.rows[name].teaches]
        done = [*trained, *self._states("DISCARDED")]
        chosen = data.draw(st.lists(st.sampled_from(done), unique=True)) if done else []
        named = select(experiences.c.id).where(experiences.c.msg_id.in_(chosen))
        assert len(self._do(lambda c: transitions.remove(c, c.execute(named).scalars().all()))) == len(chosen)
        for name in chosen:
            del self.rows[name]

    @invariant()
    def the_ledger_is_as_the_model_says(self) -> None:
        if not hasattr(self, "rows"):
            return
        c = experiences.c
        columns = (c.msg_id, c.conversation_id, c.state, c.reward, c.batch_id, c.consumed_version, c.teaches, c.taught)
        with self.ledger.read() as connection:
            stands = {row[0]: (row[1] or row[0], *row[2:]) for row in connection.execute(select(*columns))}
        assert stands == {
            name: (row.conversation, row.state, row.reward, row.batch, row.consumed, row.teaches, row.taught)
            for name, row in self.rows.items()
        }


@pytest.mark.timeout(1800)
def test_the_ledger_does_what_its_model_does(tmp_path, database_url):
    url = (database_url or f"sqlite:///{tmp_path / 'ledger.sqlite3'}").replace("postgresql://", "postgresql+psycopg://")
    LedgerMachine.ledger = Ledger.open(url)
    checks = list(HealthCheck)
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            max_examples=300 if FULL else 25, stateful_step_count=40, deadline=None, suppress_health_check=checks
        ),
    )
    LedgerMachine.ledger.close()
