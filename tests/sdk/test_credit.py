"""What is said of runs and turns arrives as said, whatever happens beside it."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from tests.integration.test_credit import lease, returns
from tests.sdk.conftest import TASKS, learn, rows, said
from tests.support.batches import assemble

HI = [{"role": "user", "content": "hi"}]
CHAT = {"model": "agent", "messages": HI}


@pytest.mark.parametrize("seed", range(4))
def test_rewards_arrive_unchanged_with_concurrent_commits_and_several_choices(explorer, client, seed):
    chance = random.Random(seed)
    ended = threading.Event()

    def commit() -> None:
        while not ended.is_set():
            client.commit()

    racing = threading.Thread(target=commit)
    racing.start()
    wanted: dict[str, float] = {}
    outcomes: dict[str, tuple[float, str]] = {}
    try:
        for number in range(12):
            credit = chance.choice(["once", "each"])
            with client.run(f"task {number}", credit=credit) as run, run.model.openai() as openai:
                outcome = chance.randrange(-9, 9) / 4
                for _ in range(chance.randrange(1, 5)):
                    reply = openai.chat.completions.create(model="agent", messages=HI, n=chance.randrange(1, 3))
                    wanted[reply.id] = outcome
                    if chance.random() < 0.4:
                        wanted[reply.id] = chance.randrange(-9, 9) / 8
                        run.reward(wanted[reply.id], of=reply.id)
                run.reward(outcome)
                outcomes[run.task_id] = (outcome, credit)
    finally:
        ended.set()
        racing.join()
    for row in rows(explorer):
        assert row.reward == wanted[row.msg_id]
    assert {row.msg_id for row in rows(explorer)} == set(wanted)


def test_a_repeat_of_a_run_s_feedback_changes_nothing(explorer, client):
    with client.run() as run, run.model.openai() as openai:
        openai.chat.completions.create(model="agent", messages=HI)
        run.reward(0.5)
    before = said(explorer)
    client.drive(run.finish())
    assert said(explorer) == before


def test_the_outcome_of_a_run_is_one_request_that_the_server_places(explorer, client):
    run = client.run("t", "0", credit="each")
    run.reward(1.0, metrics={"steps": 2})
    run.reward(0.5, of="chatcmpl-1")
    bodies = [body for _, body in run.feedback()]
    assert bodies == [
        {"task_id": "t", "run_id": "0", "reward": 1.0, "metrics": {"steps": 2}, "each": True},
        {"msg_ids": ["chatcmpl-1"], "reward": 0.5},
    ]


def prompts(chance: random.Random, reply: list[int], turns: int, kinds: list[str]) -> Iterator[list[int]]:
    """Token ids of the prompts of a run's turns: each goes on, branches off an earlier one, or is a new history."""
    earlier = [[1, chance.randrange(2, 60), 4]]
    yield earlier[0]
    for number in range(turns - 1):
        kind = chance.choice(kinds)
        base = earlier[-1] if kind == "goes on" else chance.choice(earlier)
        earlier.append([1, 61 + number, 4] if kind == "rewritten" else [*base, *reply, 20 + number])
        yield earlier[-1]


@pytest.mark.parametrize("seed", range(6))
def test_a_run_s_reward_counts_once_in_the_trainer_s_sequences_however_its_turns_are_linked(
    explorer, client, scripted_engine, seed
):
    """Branches and rewritten histories make several sequences of a run: each turn's return is the reward, once."""
    chance, script = random.Random(seed), scripted_engine.script
    outcomes: dict[str, tuple[float, str]] = {}
    for number in range(10):
        credit = chance.choice(["once", "each"])
        with client.run(f"task {number}", credit=credit) as run, run.model.openai() as openai:
            kinds = ["goes on", "branches", "rewritten"] if credit == "once" else ["goes on"]
            for prompt in prompts(chance, script.reply_ids, chance.randrange(1, 7), kinds):
                script.prompt_ids = prompt
                openai.chat.completions.create(model="agent", messages=HI)
            outcome = chance.randrange(1, 9) / 4
            run.reward(outcome)
            outcomes[run.task_id] = (outcome, credit)
    client.commit()
    by_run: dict[str, list[Any]] = defaultdict(list)
    for row in lease(explorer, at_most=1000).rows:
        by_run[row.task_id].append(row)
    assert set(by_run) == set(outcomes)
    for task_id, own in by_run.items():
        outcome, credit = outcomes[task_id]
        for sequence in assemble(own):
            found, turns = returns(sequence), len(sequence.ends)
            wanted = [outcome * (turns - turn if credit == "each" else 1) for turn in range(turns)]
            np.testing.assert_allclose([found[end] for end in sequence.ends], wanted, rtol=1e-5)


def share(reward: float, msg_ids: Sequence[str]) -> list[float]:
    return [reward / len(msg_ids) for _ in msg_ids]


def test_a_run_without_chats_is_no_rewarded_run_though_credit_is_a_function(explorer, tmp_path):
    options = {"credit": share, "retries": 0, "max_failed_share": 1.0}
    report = learn(explorer, tmp_path, lambda task: 1.0, TASKS[:2], **options)
    assert (report.rewarded, report.failures) == (0, {"NothingRecorded": 2})


def test_a_reward_arrives_though_credit_is_a_function_and_a_program_chatted(explorer, client):
    with client.run(credit=share) as run:
        httpx.post(f"{run.path_url}/chat/completions", json=CHAT, timeout=60).raise_for_status()
        run.reward(0.5)
    assert [row.reward for row in rows(explorer)] == [0.5]
