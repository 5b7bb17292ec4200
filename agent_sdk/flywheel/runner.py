"""TrainingRunner: production answers as before; the trainee replays a share of its requests, and learns from them."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any

from flywheel.conversation import Conversation, User
from flywheel.credit import Credit, check_credit
from flywheel.errors import ConfigError, describe
from flywheel.forks import renew_after_fork
from flywheel.model import Model
from flywheel.selection import Call, Chooser, SamplingRate, Selected, Selection, as_selection, current_mark
from flywheel.shadow import Agent, Replay, Shadow, ShadowOptions
from flywheel.stats import Stats
from flywheel.tools import ReadOnlyTools, Recording, recorded_in
from flywheel.transport import current_pin, current_run
from flywheel.workflow import Caller, Function, is_async

_Chosen = tuple[Call, Selected | None, Recording | None]


class TrainingRunner:
    """Shadow traffic without risk for production: callers get the answers of production's agent, at its speed.

    url, key, model: see Client. agent: `agent(request, model)`, sync or async, the one that learns. reward: a function
    of (run, reply) or (run, reply, call) that returns a reward, or None for none now; call has the request and
    production's reply. select: a strategy, or a function of a Call. repeat_time: runs of each selected request. tools:
    policy for writing tools. copy: copies a request before production can change it. Everything except the copy of a
    selected request happens in the runner's own thread and event loop.

    >>> runner = TrainingRunner("http://127.0.0.1:8010", reward=lambda run, reply: 1.0)
    >>> serve = runner.watch(lambda request, model: f"reply to {request}", production=None)
    >>> serve("hello"), runner.stats.seen
    ('reply to hello', 0)
    """

    def __init__(
        self,
        url: str | None = None,
        agent: Function | None = None,
        reward: Function | None = None,
        *,
        key: str | None = None,
        model: str | None = None,
        select: Selection | Chooser | None = None,
        repeat_time: int = 1,
        commit_every_s: float = 300.0,
        at_once: int = 10,
        queue: int = 1000,
        timeout_s: float = 300.0,
        tools: ReadOnlyTools | None = None,
        credit: Credit = "once",
        copy: Callable[[Any], Any] = copy.deepcopy,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        if reward is None:
            raise ConfigError("no reward function: give reward=, a function of (run, reply) or (run, reply, call)")
        for name, value in (("repeat_time", repeat_time), ("at_once", at_once), ("queue", queue)):
            if value < 1:
                raise ConfigError(f"{name}={value}: give 1 or more")
        check_credit(credit)
        self.stats = Stats()
        self._agent = agent
        self._select = SamplingRate(0.1) if select is None else as_selection(select)
        self._tools = ReadOnlyTools() if tools is None else tools
        self._copy = copy
        self._options = ShadowOptions(
            url, key, model, reward, self._select, repeat_time, commit_every_s, at_once, queue, timeout_s, self._tools,
            credit, copy, on_error,
        )  # fmt: skip
        self._shadow: Shadow | None = None
        self._is_started = False
        self._lock = threading.Lock()
        renew_after_fork(self)

    def renew(self) -> None:
        """In a forked process: count from 0, and replay in a thread of its own from the next call on."""
        self.stats = Stats()
        self._shadow, self._lock = None, threading.Lock()

    @property
    def running(self) -> bool:
        """Whether selected calls are replayed."""
        return self._is_started

    def start(self) -> None:
        """Start to select and replay; a second call does nothing. Production is served without it, too."""
        import openai.resources.chat.completions  # noqa: F401 — the first replay would delay production

        with self._lock:
            self._shadow = self._shadow or Shadow(self._options, self.stats)
            self._is_started = True

    def _running_shadow(self) -> Shadow | None:
        if self._shadow is None and self._is_started:  # this process was forked
            with self._lock:
                if self._shadow is None and self._is_started:
                    self._shadow = Shadow(self._options, self.stats)
        return self._shadow

    def stop(self, drain_s: float = 30.0) -> None:
        """Stop selecting, wait up to drain_s for queued and running replays, then commit within that time or 5 s."""
        with self._lock:
            self._is_started = False
            shadow, self._shadow = self._shadow, None
        if shadow is not None:
            shadow.stop(drain_s)

    def commit(self) -> None:
        """Commit now; a failure is counted in stats, and the next periodic commit retries.

        Returns when the commit is done; in an async agent, reward function or selection, when it has begun.
        """
        if (shadow := self._running_shadow()) is not None:
            shadow.commit()

    def __enter__(self) -> TrainingRunner:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def watch(self, agent: Function, *, production: Model | None = None) -> Function:
        """Return the production function: `serve(request)` calls `agent(request, production)`, and shadows it.

        It is sync for a sync agent and async for an async one. It returns what the agent returns, and raises what the
        agent raises.
        """
        trainee = functools.partial(Caller, self.trainee_of(agent), ("request", "model"))

        @functools.wraps(agent)
        async def asynchronous(request: Any) -> Any:
            chosen = self._before(request)
            return await answered(agent(request, production), chosen)

        async def answered(call: Awaitable[Any], chosen: _Chosen | None) -> Any:
            with nullcontext() if chosen is None else recorded_in(chosen[2]):
                reply = await call
            self._after(trainee, chosen, reply)
            return reply

        @functools.wraps(agent)
        def synchronous(request: Any) -> Any:
            chosen = self._before(request)
            with nullcontext() if chosen is None else recorded_in(chosen[2]):
                reply = agent(request, production)
            if inspect.iscoroutine(reply):
                return answered(reply, chosen)
            self._after(trainee, chosen, reply)
            return reply

        return asynchronous if is_async(agent) else synchronous

    def conversation(
        self, agent: Function, *, production: Model | None = None, user: User | None = None, turns: int = 20
    ) -> Conversation:
        """Return a conversation with an agent of (messages, model): `reply = chat.say(text)`, at the end `chat.end()`.

        user: None replays each turn on the recorded history; "recorded", or a function of (messages, recorded) such as
        SimulatedUser, replays the whole with that user, for at most `turns` turns.
        """
        return Conversation(self, agent, production, user, turns)

    def trainee_of(self, agent: Function) -> Function:
        """Return the agent that replays in place of this one."""
        return self._agent or agent

    def offer(self, agent: Agent, request: Any, reply: Any, recorded: Recording) -> None:
        """Replay a request that production has answered, if it is selected.

        Raises no error, and does not wait, except for the start of a thread after a fork.
        """
        chosen = self._before(request)
        if chosen is not None:
            chosen = (*chosen[:2], recorded if self._tools.records else None)
        self._after(agent, chosen, reply)

    def _before(self, request: Any) -> _Chosen | None:
        """Return a copy of a call that is, or may be, selected; None for others. Raises no error."""
        try:
            pin = current_pin.get()
            is_evaluated = pin is not None and pin.evaluated is not None
            if self._running_shadow() is None or current_run.get() is not None or is_evaluated:
                return None  # not running; or a call of a run or an evaluation, which is not production
            self.stats.seen += 1
            call = Call(request, mark=current_mark())
            selected = None
            if self._select.early:
                selected = self._select.pick(call)
                if selected is None:
                    return None
            copied = replace(call, request=self._copy(request))
            return copied, selected, [] if self._tools.records else None
        except Exception as exc:  # noqa: BLE001 — a user's strategy or copy: production continues
            self._count("watch", exc)
            return None

    def _after(self, agent: Agent, chosen: _Chosen | None, reply: Any) -> None:
        """Submit a selected call. Raises no error, and does not wait."""
        if chosen is None:
            return
        try:
            call, selected, recorded = chosen
            shadow = self._shadow
            self.stats.selected += selected is not None
            seen, known = replace(call, reply=reply), [] if recorded is None else recorded
            if shadow is None or not shadow.offer(Replay(agent, call.request, seen, selected, known)):
                self.stats.lose(selected)
        except Exception as exc:  # noqa: BLE001 — production continues
            self._count("watch", exc)

    def _count(self, cause: str, error: Exception) -> None:
        self.stats.failed[cause] += 1
        self.stats.last_error = describe(error)
