"""play over the real explorer: turns, what ends an episode, and learn for a time."""

from __future__ import annotations

import threading
from typing import Any

import flywheel
import openai
import pytest
from flywheel.transport import current_run

from tests.sdk.conftest import rows
from tests.support.time_limits import end_when, limit_when


class Countdown:
    """An environment that ends after `turns` steps, each of which earns 0.5; or never."""

    def __init__(self, turns: int | None) -> None:
        self.left, self.said = turns, []

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return f"begin {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.said.append(action)
        self.left = None if self.left is None else self.left - 1
        return f"left {self.left}", 0.5, self.left == 0, False, {"left": self.left}


async def test_an_episode_is_one_conversation_and_its_rewards_add_up(explorer):
    environment = Countdown(3)
    async with flywheel.AsyncClient(explorer.url) as client, client.run() as run:
        played = await flywheel.play(environment, run.model, system="rules", seed=4, max_tokens=5)
        run.reward(played.reward)
    assert (played.reward, played.turns, played.terminated, played.info) == (1.5, 3, True, {"left": 0})
    assert [message["role"] for message in played.messages] == ["system", *["user", "assistant"] * 3]
    assert played.messages[1]["content"] == "begin 4"
    assert [message["content"] for message in played.messages if message["role"] == "assistant"] == environment.said
    assert len(rows(explorer)) == 3
    assert len({row.conversation_id for row in rows(explorer)}) == 1


async def test_an_episode_without_an_end_is_cut_off(explorer):
    async with flywheel.AsyncClient(explorer.url) as client:
        played = await flywheel.play(Countdown(None), client.model(), max_turns=4)
    assert (played.turns, played.terminated) == (4, False)
    assert played.messages[0] == {"role": "user", "content": "begin None"}


# vLLM's errors: for more tokens than the context holds, and for as many, with and without max_tokens
FULL = ("maximum context length is 9", "longer than the maximum model length", "max_tokens must be at least 1, got 0")


@pytest.mark.parametrize("too_long", FULL)
async def test_an_episode_ends_where_its_history_fills_the_models_context(too_long, explorer, scripted_engine):
    scripted_engine.script.most_messages, scripted_engine.script.too_long = 6, too_long
    async with flywheel.AsyncClient(explorer.url) as client:
        played = await flywheel.play(Countdown(None), client.model())
        assert (played.turns, played.terminated, played.reward) == (3, False, 1.5)
        assert played.messages[-1] == {"role": "user", "content": "left None"}
        scripted_engine.script.most_messages = 0
        with pytest.raises(openai.BadRequestError, match=too_long):
            await flywheel.play(Countdown(None), client.model())


async def test_a_chat_that_is_refused_for_another_reason_fails_the_episode(explorer, scripted_engine):
    scripted_engine.script.most_messages, scripted_engine.script.too_long = 6, "messages: too many"
    async with flywheel.AsyncClient(explorer.url) as client:
        with pytest.raises(openai.BadRequestError, match="messages: too many"):
            await flywheel.play(Countdown(None), client.model())


class OldCountdown(Countdown):
    """The same with Gym's older interface; where it ends, its time limit may be the reason."""

    def __init__(self, turns: int, **ended: bool) -> None:
        super().__init__(turns)
        self.ended = ended

    def reset(self) -> str:
        return "begin"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        observation, reward, done, _, _ = super().step(action)
        return observation, reward, done, self.ended


@pytest.mark.parametrize(("ended", "terminated"), [({}, True), ({"TimeLimit.truncated": True}, False)])
async def test_an_environment_with_gyms_older_interface_is_played_too(ended, terminated, explorer):
    async with flywheel.AsyncClient(explorer.url) as client:
        played = await flywheel.play(OldCountdown(3, **ended), client.model())
    assert (played.reward, played.turns, played.terminated) == (1.5, 3, terminated)
    assert played.messages[0] == {"role": "user", "content": "begin"}


async def test_a_step_that_returns_something_else_is_named(explorer):
    class Odd(Countdown):
        def step(self, action: str) -> Any:
            return "text", 1.0

    async with flywheel.AsyncClient(explorer.url) as client:
        with pytest.raises(TypeError, match=r"Odd.step returned .* 5 values"):
            await flywheel.play(Odd(1), client.model())


class Held(Countdown):
    """An environment whose step, in one task, does not return before it is released."""

    def __init__(self, released: threading.Event | None, held: list[int]) -> None:
        super().__init__(1)
        self.released, self.held, self.threads = released, held, set()

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.threads.add((threading.current_thread().name, threading.get_ident()))
        return super().reset(seed=seed)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.threads.add((threading.current_thread().name, threading.get_ident()))
        if self.released is not None:
            self.held.append(1)
            self.released.wait(120)
        return super().step(action)


def test_a_step_in_a_thread_that_hangs_costs_its_own_run_alone(explorer, monkeypatch):
    released, held, played = threading.Event(), [], []
    limit_when(monkeypatch, "evaluation", lambda: held and len(played) == 2)

    async def workflow(task: Any, model: flywheel.Model) -> float:
        environment = Held(None if task["n"] else released, held)
        reward = (await flywheel.play(environment, model, in_thread=True)).reward
        [(name, _)] = environment.threads  # one for reset and each step
        played.append(name)
        return reward

    tasks = [{"n": n} for n in range(3)]
    found = flywheel.evaluate(workflow, tasks, model=0, url=explorer.url, timeout_s=0.2)
    assert (found.n, found.failed, found.mean, released.is_set()) == (2, 1, 0.5, False)
    assert all(name.startswith("flywheel-play") for name in played)
    released.set()


async def test_an_environment_in_a_thread_sees_the_callers_context_and_its_error_is_raised(explorer):
    class Asking(Countdown):
        def step(self, action: str) -> Any:
            seen.append(current_run.get())
            return next(iter(()))

    seen: list[Any] = []
    async with flywheel.AsyncClient(explorer.url) as client:
        with pytest.raises(RuntimeError, match="StopIteration"):
            async with client.run() as run:
                await flywheel.play(Asking(1), run.model, in_thread=True)
    assert seen == [run]


def test_learn_ends_at_its_time_limit_and_finishes_running_runs(explorer, tmp_path, monkeypatch):
    played: list[Any] = []
    end_when(monkeypatch, lambda: len(played) > 8)

    async def play(task: Any, model: flywheel.Model) -> float:
        reward = (await flywheel.play(Countdown(2), model)).reward
        played.append(task)
        return reward

    options: dict[str, Any] = {"require_trainer": False, "progress": False, "folder": tmp_path / "runs"}
    tasks = [{"n": n} for n in range(5)]
    report = flywheel.learn(
        play, tasks, url=explorer.url, epochs=100_000, seconds=2.0, at_once=4, max_ready_rows=10**6, **options
    )
    assert report.stopped == "time"
    assert report.runs == report.rewarded > 4
    assert all(row.reward is not None for row in rows(explorer))
