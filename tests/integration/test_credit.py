"""Credit over real HTTP: what is said of a run counts once, reaches every turn, and makes all of them ready."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from sqlalchemy import select, update

from shared.config import TrainerConfig
from shared.experience import Experience, Lease
from shared.ledger import queries, transitions
from shared.ledger.tables import experiences, signals
from shared.reward import SCORES
from tests.support.batches import assemble, gather
from tests.support.forms import FULL
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer
from trainer_service.algorithms.advantages import gae
from trainer_service.models import load_prepared, score_actions
from trainer_service.packing import pack
from trainer_service.trajectories import TokenSequence

RUN = {"task_id": "task", "run_id": "1"}


def chat_run(explorer: RunningExplorer, engine: ScriptedEngine, turns: int = 8, merges: bool = True) -> list[str]:
    """A run's chats. merges: each prompt begins with the tokens of the turn before."""
    names, script = [], engine.script
    script.prompt_ids = [1, 2, 3, 4]
    for number in range(turns):
        names.append(explorer.chat(metadata=RUN).raise_for_status().json()["id"])
        script.prompt_ids = [*script.prompt_ids, *script.reply_ids, 20] if merges else [1, 30 + number, 4]
    return names


def say(explorer: RunningExplorer, **body: Any) -> dict[str, Any]:
    return explorer.http.post("/feedback", json=body).raise_for_status().json()


def commit(explorer: RunningExplorer, **body: Any) -> int:
    return explorer.http.post("/commit", json=body).raise_for_status().json()["committed"]


def stored(explorer: RunningExplorer, *columns: str) -> list[Any]:
    with explorer.ledger.read() as connection:
        query = select(*(experiences.c[name] for name in columns)).order_by(experiences.c.id)
        rows = connection.execute(query).all()
    return [row[0] if len(columns) == 1 else tuple(row) for row in rows]


def lease(explorer: RunningExplorer, **asked: Any) -> Lease:
    with explorer.ledger.write() as connection:
        batch = transitions.claim(connection, **{"owner": "t", "at_least": 1, "at_most": 64, "lease_s": 60, **asked})
        return Lease(0, []) if batch is None else queries.load_lease(connection, batch, kinds=SCORES)


def returns(sequence: TokenSequence) -> np.ndarray:
    """Of each action, undiscounted and without a critic."""
    return gae(sequence.rewards, np.zeros_like(sequence.rewards), gamma=1.0, lam=1.0)[0]


@pytest.mark.parametrize("merges", [True, False])
@pytest.mark.parametrize("targets", ["run", "messages", "conversation", "last message"])
def test_a_run_of_eight_turns_rewarded_once_trains_every_turn_with_that_return(
    explorer, scripted_engine, model, merges, targets
):
    names = chat_run(explorer, scripted_engine, merges=merges)
    if targets == "conversation":  # turns that are linked, and name no run
        with explorer.ledger.write() as connection:
            linked = {"conversation_id": names[0], "task_id": None, "run_id": None}
            connection.execute(update(experiences).values(linked))
    say(
        explorer,
        **{
            "run": {**RUN, "reward": 0.8},
            "messages": {"msg_ids": names, "reward": 0.8},
            "conversation": {"msg_ids": names[:1], "reward": 0.8, "scope": "conversation"},
            "last message": {"msg_ids": names[-1:], "reward": 0.8},
        }[targets],
    )
    shown = [0.8] * 8 if targets != "last message" else [None] * 7 + [0.8]
    assert stored(explorer, "reward") == shown
    assert commit(explorer) == 8
    held = lease(explorer)
    assert [row.msg_id for row in held.rows] == names and not held.corrupt
    sequences = assemble(held.rows)
    assert len(sequences) == (1 if merges else 8)
    for sequence in sequences:
        np.testing.assert_allclose(returns(sequence), 0.8, rtol=1e-6)
    if FULL or targets == "run":  # the sequences are the same
        _check_gradient(model, sequences, held.rows, 0.8)


def _check_gradient(folder: Any, sequences: list[TokenSequence], rows: list[Experience], reward: float) -> None:
    """REINFORCE's gradient of the packed sequences is that of each turn alone, times the reward."""
    policy = load_prepared(folder)

    def gradient(batch: list[TokenSequence], weights: list[np.ndarray]) -> torch.Tensor:
        policy.zero_grad()
        for micro in pack(batch, range(len(batch)), max_tokens=4096):
            (score_actions(policy, micro)["logprobs"] * gather(weights, micro)).sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])

    found = gradient(sequences, [returns(sequence) for sequence in sequences])
    alone = torch.zeros_like(found)
    for row in rows:
        (turn,) = assemble([row])
        alone += gradient([turn], [np.full(len(turn.actions), reward, np.float32)])
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


def test_each_message_of_a_run_is_rewarded_when_that_is_asked_for(explorer, scripted_engine):
    names = chat_run(explorer, scripted_engine, turns=3)
    say(explorer, **RUN, reward=0.5, each=True)
    commit(explorer)
    (sequence,) = assemble(lease(explorer).rows)
    assert [returns(sequence)[end] for end in sequence.ends] == [1.5, 1.0, 0.5]
    with explorer.ledger.read() as connection:
        assert set(connection.execute(select(signals.c.msg_id, signals.c.scope))) == {(n, "message") for n in names}


def test_the_log_and_the_row_keep_what_feedback_was_about(explorer, scripted_engine):
    first, second, third = chat_run(explorer, scripted_engine, turns=3)
    alone = explorer.chat().json()["id"]
    say(explorer, msg_ids=[second], reward=0.25)
    say(explorer, task_id="task", rating="up")
    say(explorer, msg_ids=[first, third, alone], metrics={"speed": 3})
    say(explorer, msg_ids=[first], comment="short", scope="conversation")
    with explorer.ledger.read() as connection:
        columns = (signals.c.msg_id, signals.c.kind, signals.c.scope)
        log = set(map(tuple, connection.execute(select(*columns))))
    assert log == {
        (second, "reward", "message"),
        *((name, "rating", "run") for name in (first, second, third)),
        *((name, "metric", "messages") for name in (first, third)),
        (alone, "metric", "message"),
        (first, "comment", "conversation"),
    }
    assert stored(explorer, "reward", "turn_reward", "outcome") == [
        (1.0, None, 1.0), (1.0, 0.25, 1.0), (1.0, None, 1.0), (None, None, None)
    ]  # fmt: skip


def test_a_message_s_reward_and_the_run_s_count_both_and_each_is_replaced_by_a_later_one_of_its_kind(
    explorer, scripted_engine
):
    first, second = chat_run(explorer, scripted_engine, turns=2)
    for said in ({"msg_ids": [first], "reward": 9}, {**RUN, "reward": 9}, {**RUN, "reward": 1}):
        say(explorer, **said)
    assert say(explorer, msg_ids=[first], reward=0.25)["receipts"] == [{"msg_id": first, "state": "updated"}]
    assert say(explorer, msg_ids=[first], reward=0.25)["receipts"][0]["state"] == "duplicate"
    commit(explorer)
    held = lease(explorer)
    (sequence,) = assemble(held.rows)
    assert [returns(sequence)[end] for end in sequence.ends] == [1.25, 1.0]
    assert [(s.kind, s.value, s.scope) for s in held.rows[1].signals] == [("reward", 9, "run"), ("reward", 1, "run")]
    assert {row.msg_id: row.finish_reason for row in held.rows} == {first: "stop", second: "stop"}
    assert [row.version_end for row in held.rows] == [0, 0]


def test_one_message_each_of_several_runs_stays_at_its_turn(explorer):
    names = [explorer.chat(metadata={"task_id": "t", "run_id": str(n)}).json()["id"] for n in range(2)]
    say(explorer, msg_ids=names, reward=1)
    assert stored(explorer, "outcome") == [None, None]
    named = [explorer.chat().json()["id"] for _ in range(2)]
    say(explorer, msg_ids=named, reward=1, task_id="u", run_id="0")  # these are one run from now on
    assert stored(explorer, "outcome") == [None, None, 1.0, 1.0]


def test_a_comment_readies_nothing_that_the_algorithm_does_not_learn_from(explorer, scripted_engine):
    names = chat_run(explorer, scripted_engine, turns=2)
    say(explorer, msg_ids=names, comment="too long", correction="shorter", metrics={"unweighted": 1.0})
    assert commit(explorer) == 0


def test_a_commit_takes_the_rest_of_a_trajectory_within_its_scope_and_its_keys(explorer, scripted_engine):
    first, second, _ = chat_run(explorer, scripted_engine, turns=3)
    before = stored(explorer, "created_at")[2]
    say(explorer, msg_ids=[first], reward=1)
    assert commit(explorer, task_id="another") == 0
    assert commit(explorer, time_threshold=before) == 2
    assert stored(explorer, "state") == ["READY", "READY", "RECORDED"]
    assert commit(explorer) == 0, "a row that was left waits until something is said of it, or of the whole again"
    say(explorer, **RUN, rating="up")
    assert commit(explorer) == 1
    assert second


def test_rows_of_a_trajectory_that_was_spoken_of_do_not_expire(explorer, scripted_engine):
    names = chat_run(explorer, scripted_engine, turns=2)
    explorer.chat()
    say(explorer, msg_ids=names[1:], reward=1)
    with explorer.ledger.write() as connection:
        assert transitions.expire(connection, before=1e12) == 1
    assert stored(explorer, "state") == ["RECORDED", "RECORDED", "DISCARDED"]


def test_a_run_is_claimed_whole_though_its_turns_are_not_linked_and_a_task_where_that_is_asked_for(explorer):
    for run in (1, 1, 2, 1):
        explorer.chat(metadata={"task_id": "a", "run_id": run})
    explorer.chat(metadata={"task_id": "b", "run_id": 1})
    say(explorer, task_id="a", reward=1)
    say(explorer, task_id="b", reward=1)
    commit(explorer)
    assert [row.run_id for row in lease(explorer, at_most=1).rows] == ["1", "1", "1"]
    with explorer.ledger.write() as connection:
        transitions.give_back(connection, owner="t")
    assert [row.run_id for row in lease(explorer, at_most=1, whole="task").rows] == ["1", "1", "2", "1"]
    assert [row.task_id for row in lease(explorer, at_most=64).rows] == ["b"]


def test_a_run_that_fails_alone_is_quarantined_whole(explorer, scripted_engine):
    chat_run(explorer, scripted_engine, turns=3, merges=False)
    say(explorer, **RUN, reward=1)
    commit(explorer)
    for _ in range(2):
        held = lease(explorer, at_most=1)
        assert len(held.rows) == 3
        with explorer.ledger.write() as connection:
            quarantined = transitions.fail_update(connection, held.batch_id, "it is too long")
    assert quarantined == 3
    assert stored(explorer, "state") == ["DISCARDED"] * 3


def test_rows_that_nothing_was_said_of_count_towards_the_share_of_the_key_that_spoke_of_their_run(
    scripted_engine, start_explorer
):
    keys = [hashed("chat", "chat"), hashed("rate", "feedback"), hashed("other", "feedback")]
    explorer = start_explorer([scripted_engine.url], keys=keys).wait_ready()
    explorer.http.headers["Authorization"] = f"Bearer {'chat':*<16}"
    (_, last), (alone,) = chat_run(explorer, scripted_engine, turns=2), [explorer.chat().json()["id"]]
    for key, name in (("rate", last), ("other", alone)):
        explorer.http.headers["Authorization"] = f"Bearer {key:*<16}"
        say(explorer, msg_ids=[name], reward=1)
    assert commit(explorer) == 3
    assert stored(explorer, "feedback_key") == ["rate", "rate", "other"]


def hashed(name: str, role: str, **more: Any) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(f"{name:*<16}".encode()).hexdigest(), "name": name, "role": role, **more}


def test_a_task_is_claimed_by_its_runs_once_updates_with_it_failed_twice(explorer):
    from shared.stop_request import StopRequest
    from trainer_service.claim import Claimer

    for run in (1, 2, 1):
        explorer.chat(metadata={"task_id": "a", "run_id": run})
    say(explorer, task_id="a", reward=1)
    commit(explorer)
    config = TrainerConfig(algorithm="grpo", batch_size=1, poll_interval_s=0.02)
    claimer = Claimer(explorer.ledger, config, StopRequest())
    taken = []
    for _ in range(3):
        held = claimer.next()
        assert held is not None
        taken.append(len(held.rows))
        with explorer.ledger.write() as connection:
            transitions.fail_update(connection, held.batch_id, "no number")
        claimer.search_anew()
    assert taken == [3, 3, 2]
    assert stored(explorer, "state") == ["DISCARDED", "READY", "DISCARDED"]


def test_the_status_says_what_learns_and_from_how_many_rows(explorer):
    status = explorer.http.get("/status").json()
    assert [status[name] for name in ("algorithm", "batch_size", "max_staleness_versions")] == ["ppo", 64, None]
