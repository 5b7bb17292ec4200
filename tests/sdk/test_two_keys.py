"""A process that chats and rewards with keys of two roles."""

from __future__ import annotations

import flywheel
import httpx

from tests.integration.test_keys import hashed
from tests.sdk.conftest import rows, say
from tests.support.servers import RunningExplorer, make_config


def test_a_run_of_a_chat_key_is_rewarded_by_a_feedback_key_under_the_same_names(scripted_engine, tmp_path):
    keys = [hashed("chats", "chat"), hashed("rewards", "feedback")]
    explorer = RunningExplorer(make_config(tmp_path, [scripted_engine.url], keys=keys)).wait_ready()
    try:
        with (
            flywheel.Client(explorer.url, key="chats") as chats,
            flywheel.Client(explorer.url, key="rewards") as rewards,
        ):
            with chats.run(task_id="t", run_id="0") as run:
                say(run.model)
            with rewards.run(task_id="t", run_id="0") as run:
                run.reward(0.5)
            assert rewards.commit().committed == 1
        [row] = rows(explorer)
        assert (row.reward, row.key_name, row.feedback_key) == (0.5, "chats", "rewards")
    finally:
        explorer.stop()


def test_a_run_of_a_chat_key_whose_program_chatted_is_left_without_an_error(scripted_engine, tmp_path):
    keys = [hashed("chats", "chat")]
    explorer = RunningExplorer(make_config(tmp_path, [scripted_engine.url], keys=keys)).wait_ready()
    try:
        with flywheel.Client(explorer.url, key="chats") as client, client.run(task_id="t") as run:
            key = {"Authorization": f"Bearer {run.env()['OPENAI_API_KEY']}"}
            body = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}
            httpx.post(f"{run.path_url}/chat/completions", json=body, headers=key, timeout=60).raise_for_status()
        assert [row.task_id for row in rows(explorer)] == ["t"]
    finally:
        explorer.stop()
