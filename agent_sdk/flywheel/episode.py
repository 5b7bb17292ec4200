"""One run of a workflow on a task: attempts, timeouts, the reward, and its lines in the journal."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flywheel.async_client import AsyncClient
from flywheel.config import LearnConfig
from flywheel.errors import ConfigError, JudgeFailed, TimedOut, TooManyFailures
from flywheel.feedback import Feedback, nothing_recorded, send_all
from flywheel.journal import Journal
from flywheel.reward import Reward
from flywheel.run import AsyncRun
from flywheel.tasks import NamedTask
from flywheel.transport import Pin, current_pin
from flywheel.workflow import Caller, score, within

log = logging.getLogger("flywheel")
UntilServed = Callable[[], Awaitable[bool]]
_WINDOW = 50  # number of attempts that max_failed_share refers to


@dataclass
class Failures:
    """Counts failed attempts by cause. Raises TooManyFailures if their share of the last 50 is too large."""

    max_share: float
    causes: Counter[str] = field(default_factory=Counter)
    _last: deque[bool] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _first: list[str] = field(default_factory=list)
    _excused: set[str] = field(default_factory=set)

    def succeeded(self) -> None:
        """Count an attempt with a result."""
        self._last.append(False)

    def failed(self, error: BaseException) -> None:
        """Count a failed attempt."""
        name = type(error).__name__
        if name not in self.causes:
            log.warning("a run failed; the first %s: %s", name, error)
        self.causes[name] += 1
        self._last.append(True)
        if len(self._first) < 3:
            self._first.append("".join(traceback.format_exception(type(error), error, error.__traceback__)))

    def excused(self, error: BaseException) -> None:
        """Log, once for each cause, an attempt that is no failure, because its last chat got no answer."""
        status = getattr(error, "status_code", None)  # of OpenAI's client, which has one type for 503 and 504
        cause = type(error).__name__ if status is None else f"{type(error).__name__} {status}"
        if cause not in self._excused:
            self._excused.add(cause)
            log.warning("a run whose last chat got no answer is made again; this is no failure: %s: %s", cause, error)

    def check(self) -> None:
        """Raise TooManyFailures if too many attempts failed."""
        full = len(self._last) == _WINDOW
        if full and sum(self._last) > self.max_share * _WINDOW:
            raise TooManyFailures(
                f"{sum(self._last)} of the last {_WINDOW} attempts failed, and max_failed_share is {self.max_share:g}. "
                "The first ones:\n" + "\n".join(self._first)
            )


@dataclass
class Attempts:
    """How a run is attempted: the common parts of all runs of a learn."""

    client: AsyncClient
    journal: Journal
    failures: Failures
    workflow: Caller
    judge: Caller | None
    how: LearnConfig
    counted: int = 0  # runs that ended since this start

    async def run(self, task: NamedTask, task_id: str, number: int, until_served: UntilServed) -> int | None:
        """Try until an attempt gives a result; after the last failure, drop the run. Each attempt is a new run.

        until_served: waits for an engine after an attempt that none answered, which is no failure for timeout_s. If it
        returns False, learn is stopping, and nothing is journaled, so that a later start makes the run.
        Returns the number of its chats: 0 if it was dropped, None if it was not made.
        """
        place = f"{task_id}#{number}"
        failed, excused_until = 0, math.inf
        for attempt in itertools.count():
            run = AsyncRun(self.client.explorer, task_id, self._run_id(number, attempt), self.how.credit)
            began = time.monotonic()
            failure: Exception | None
            try:
                reward = await self._try(task, run)
            except (ConfigError, asyncio.CancelledError):
                raise
            except TimedOut as exc:
                if await self._end_late(place, run, exc, began):
                    return run.chats
                break  # nothing was sent: it has no chats, or its credit function failed
            except JudgeFailed as exc:
                self._failed(exc)  # the run is valid: another attempt would not help the judge
                await self._end(place, run, None, "unjudged", began)
                return 0
            except Exception as exc:  # noqa: BLE001 — a user's agent may raise anything; its run is never rewarded
                failure = exc
            else:
                failure = await self._end(place, run, reward, "rewarded" if reward else "unrewarded", began)
            if failure is None:
                self.failures.succeeded()
                return run.chats
            run.forget()
            if run.is_unanswered:
                excused_until = min(excused_until, time.monotonic() + self.how.timeout_s)
            is_excused = run.is_unanswered and time.monotonic() < excused_until
            self._failed(failure, is_excused)
            failed += not is_excused
            if failed > self.how.retries:
                break
            if run.is_unanswered and not await until_served():
                return None
        await self.journal.write(self._line(place, None, None, "dropped", 0.0))
        self.counted += 1
        return 0

    async def _end_late(self, place: str, run: AsyncRun, error: TimedOut, began: float) -> bool:
        """End a run that took too long. Returns False if nothing was sent."""
        self._failed(error)
        reward = None if self.how.on_timeout is None else Reward(self.how.on_timeout)
        if await self._end(place, run, reward, "timeout", began) is None:
            return True
        run.forget()
        return False

    def _failed(self, error: Exception, is_excused: bool = False) -> None:
        """Count a failed attempt, in the journal for the report, which is over all starts; only log an excused one."""
        if is_excused:
            self.failures.excused(error)
            return
        self.failures.failed(error)
        self.journal.note({"kind": "failed", "cause": type(error).__name__})

    def _run_id(self, number: int, attempt: int) -> str:
        """Return a run id for each attempt, start and journal: no later run reaches the rows of a failed one."""
        session, token = self.journal.session, self.journal.token
        name = f"{number}.{token}" if token else str(number)
        return name if (session, attempt) == (1, 0) else f"{name}.{session}.{attempt}"

    async def _try(self, task: NamedTask, run: AsyncRun) -> Reward | None:
        run.pinned = run.model.with_params(**self.how.params)
        current_pin.set(Pin(run.origin, self.client.explorer.name, {}, self.how.params))  # in this run's own context
        with run.current():
            result = await within(self.workflow(task.task, run.model, run), self.how.timeout_s)
            return await score(result, self.judge, task.task, run, self.how.timeout_s)

    async def _end(
        self, place: str, run: AsyncRun, reward: Reward | None, outcome: str, began: float
    ) -> Exception | None:
        """Journal the end of a run, then send its feedback. Returns why the attempt failed, such as NothingRecorded."""
        if reward is None:  # without a reward of the run, rewards of its turns are dropped, too
            run.forget()
        run.take(reward)
        try:
            feedback = run.feedback()  # built once: after a crash, the same feedback must be sent again
        except ConfigError:
            raise
        except Exception as exc:  # noqa: BLE001 — a user's credit function
            return exc
        run.forget()  # its work is done: what the workflow left running sends nothing about it
        await self.journal.write(self._line(place, run, reward, outcome, time.monotonic() - began, feedback))
        if not await self.client.drive(send_all(feedback, self.client.explorer.retry_s)):
            await self.journal.write({"kind": "void", "place": place})
            return nothing_recorded(run)
        self.journal.note({"kind": "sent", "place": place})
        self.counted += 1
        return None

    @staticmethod
    def _line(
        place: str,
        run: AsyncRun | None,
        reward: Reward | None,
        outcome: str,
        seconds: float,
        feedback: Sequence[Feedback] = (),
    ) -> dict[str, Any]:
        return {
            "kind": "ended",
            "place": place,
            "outcome": outcome,
            "run_id": run.run_id if run else None,
            "reward": reward.figure if reward else None,
            "metrics": dict(reward.metrics) if reward else {},
            "chats": run.chats if run else 0,
            "seconds": round(seconds, 3),
            "feedback": feedback,
        }
