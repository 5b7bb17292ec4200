"""The shadow side of TrainingRunner: a thread with its own event loop, in which selected requests are replayed.

No error here reaches production; failures are counted by cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from typing import Any

from flywheel.async_client import AsyncClient
from flywheel.credit import Credit
from flywheel.errors import TimedOut, Unreachable, UnsafeTool, describe
from flywheel.model import Model
from flywheel.reward import Reward, read_reward
from flywheel.run import AsyncRun
from flywheel.selection import Call, Selected, Selection
from flywheel.stats import Stats
from flywheel.tasks import new_task_id
from flywheel.threads import DaemonThreads
from flywheel.tools import ReadOnlyTools, Recording, ShadowGuard, judging
from flywheel.workflow import Caller, Function, within

log = logging.getLogger("flywheel")
Agent = Callable[[Executor], Callable[[Any, Model], Awaitable[Any]]]  # from the threads for its sync functions
_LOOK_S = 0.1  # between two checks that the shadow thread runs
LAST_S = 5.0  # minimum time for the commit of stop, and for cancelled runs to end


@dataclass(frozen=True)
class Replay:
    """A production call to replay: a copy of its request, and the reason. selected: None if not decided yet."""

    agent: Agent
    request: Any
    call: Call
    selected: Selected | None
    recorded: Recording


@dataclass(frozen=True)
class ShadowOptions:
    """The arguments of TrainingRunner for its shadow side."""

    url: str | None
    key: str | None
    model: str | None
    reward: Function
    select: Selection
    repeat_time: int
    commit_every_s: float
    at_once: int
    queue: int
    timeout_s: float
    tools: ReadOnlyTools
    credit: Credit
    copy: Callable[[Any], Any]
    on_error: Callable[[BaseException], None] | None


class Shadow:
    """The shadow thread. offer() may be called from any thread and never waits."""

    def __init__(self, options: ShadowOptions, stats: Stats) -> None:
        self._options = options
        self._stats = stats
        self._waiting: deque[Replay] = deque()
        self._started = threading.Event()
        self._draining = False
        self._is_over = False  # no more runs start
        self._spoken = 0  # recorded replies that the next commit makes READY
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool = DaemonThreads(options.at_once, "flywheel-shadow")
        self._select = options.select.in_threads(self._pool)
        self._reward = Caller(options.reward, ("run", "reply", "call"), self._pool)
        self._client = AsyncClient(options.url, key=options.key, model=options.model)
        self._thread = threading.Thread(target=self._main, name="flywheel-shadow", daemon=True)
        self._thread.start()
        self._started.wait()

    def offer(self, replay: Replay) -> bool:
        """Queue a replay. Returns False if the queue is full, or the thread is ending."""
        if self._draining or len(self._waiting) >= self._options.queue or self._loop is None:
            return False
        self._waiting.append(replay)
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:  # the loop was just closed
            return False
        return True

    def stop(self, drain_s: float) -> None:
        """Accept no more replays, wait for queued and running ones, commit, and end.

        A run that ignores its cancellation is abandoned in its thread, which ends with the process.
        """
        self._draining = True
        if self._loop is None:  # its thread could not start
            return
        self._drain_s = drain_s
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(drain_s + LAST_S + max(LAST_S, drain_s) + LAST_S)
        if self._thread.is_alive():
            log.warning("a shadow run does not end though it was cancelled; its thread is left behind")

    def commit(self) -> None:
        """Commit now; a failure is counted, and the next periodic commit retries.

        Waits until it is done, except in the shadow thread, whose loop has to do it.
        """
        if self._loop is None:
            return
        committing = self._commit()
        try:
            committed = asyncio.run_coroutine_threadsafe(committing, self._loop)
        except RuntimeError:  # the loop was just closed, after the commit of stop
            committing.close()
            return
        while self._thread.is_alive() and threading.current_thread() is not self._thread and not committed.done():
            wait({committed}, timeout=_LOOK_S)

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception:  # such as no file descriptor for the event loop
            log.exception("the shadow thread has ended: production is served, and nothing is replayed")
        finally:
            self._started.set()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake, self._stopping, self._drain_s = asyncio.Event(), asyncio.Event(), 0.0
        async with self._client:
            workers = [asyncio.create_task(self._work()) for _ in range(self._options.at_once)]
            clock = asyncio.create_task(self._clock())
            self._started.set()
            await self._stopping.wait()
            clock.cancel()
            self._wake.set()
            _, late = await asyncio.wait(workers, timeout=self._drain_s)
            self._is_over = True
            for worker in late:
                worker.cancel()
            await asyncio.wait([*workers, clock], timeout=LAST_S)
            for replay in self._waiting:
                self._stats.lose(replay.selected)
            await self._commit_last(max(LAST_S, self._drain_s))
            self._pool.shutdown()

    async def _work(self) -> None:
        while True:
            while not self._waiting:
                if self._draining:
                    return
                self._wake.clear()
                await self._wake.wait()
            await self._replay(self._waiting.popleft())

    async def _replay(self, replay: Replay) -> None:
        """Select if not decided yet, then run repeat_time times: a group of one task."""
        try:
            selected = replay.selected or await within(self._select.decide(replay.call), self._options.timeout_s)
        except asyncio.CancelledError:
            self._stats.lose(replay.selected)
            raise
        except Exception as exc:  # noqa: BLE001 — a user's strategy
            self._failed("select", exc)
            return
        if selected is None:
            return
        self._stats.selected += replay.selected is None
        task_id = selected.task_id or new_task_id()
        prefix = "" if selected.task_id is None else f"{new_task_id()}."  # a task with a user's name has other calls
        for number in range(self._options.repeat_time):
            if self._is_over:
                return
            run = AsyncRun(self._client.explorer, task_id, f"{prefix}{number}", self._options.credit)
            await self._shadow_run(replay, run)

    async def _shadow_run(self, replay: Replay, run: AsyncRun) -> None:
        """Run once, and count the result."""
        try:
            try:
                reward = await self._attempt(replay, run)
            except BaseException:
                run.forget()
                raise
        except UnsafeTool as exc:
            self._stats.unsafe += 1
            self._stats.last_error = str(exc)
        except asyncio.CancelledError:
            self._failed("stopped", TimedOut(f"stop waited no longer than drain_s={self._drain_s:g} for it"))
            raise
        except Exception as exc:  # noqa: BLE001 — a user's agent or reward function: its run is never rewarded
            self._failed(type(exc).__name__, exc)
        else:
            self._spoken += run.spoken
            value = None if reward is None else reward.figure
            self._stats.unrewarded += value is None
            self._stats.rewarded += value is not None
            self._stats.reward_sum += value or 0.0
        finally:
            self._stats.runs += 1

    async def _attempt(self, replay: Replay, run: AsyncRun) -> Reward | None:
        """Run once and send the reward. Returns it."""
        guard = ShadowGuard(run, self._options.tools, replay.recorded)
        run.guard = guard
        with run.current():
            reply = await self._answer(replay, run, guard)
            token = judging.set(True)  # not in what the agent has left running
            try:
                result = await within(self._reward(run, reply, replay.call), self._options.timeout_s)
            finally:
                judging.reset(token)
            reward = read_reward(result) or run.outcome
        run.take(reward)
        await self._client.drive(run.finish())
        return reward

    async def _answer(self, replay: Replay, run: AsyncRun, guard: ShadowGuard) -> Any:
        """Return the trainee's reply; None if the run ended at a tool and is to be rewarded. Raises UnsafeTool."""
        agent = replay.agent(self._pool)
        request = self._options.copy(replay.request)  # the agent may change it, and the reward function gets it, too
        try:
            reply = await within(agent(request, run.model), self._options.timeout_s)
        except Exception:
            if guard.unsafe is None:
                raise
            reply = None
        if guard.unsafe is not None and not guard.rewards:
            raise guard.unsafe
        return None if guard.unsafe is not None else reply

    async def _clock(self) -> None:
        failures = 0
        while True:
            await asyncio.sleep(
                min(self._options.commit_every_s, math.inf if not failures else 2.0 ** min(failures, 6))
            )
            failures = 0 if await self._commit() else failures + 1

    async def _commit(self) -> bool:
        spoken, self._spoken = self._spoken, 0  # the explorer's answer counts rows of all callers
        try:
            await self._client.commit()
        except asyncio.CancelledError:
            self._spoken += spoken
            raise
        except Exception as exc:  # noqa: BLE001 — such as a proxy's answer: the next commit retries
            self._spoken += spoken
            self._failed("commit", exc)
            return False
        self._stats.committed += spoken
        self._stats.commits += 1
        return True

    async def _commit_last(self, timeout_s: float) -> None:
        """Commit at the end, without waiting for an explorer that hangs."""
        try:
            await asyncio.wait_for(self._commit(), timeout_s)
        except asyncio.TimeoutError:
            address = self._client.explorer.shown_url
            reason = f"POST /commit: no answer within {timeout_s:g} s; is the explorer at {address} up?"
            self._failed("commit", Unreachable(reason))

    def _failed(self, cause: str, error: BaseException) -> None:
        self._stats.failed[cause] += 1
        self._stats.last_error = describe(error)
        if self._options.on_error is not None:
            try:
                self._options.on_error(error)
            except Exception:
                log.exception("on_error raised, when it was told of a run that failed")
