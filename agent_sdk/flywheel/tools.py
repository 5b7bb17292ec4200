"""Tools in shadow runs: which of them only read, and what happens to a call that would write.

Three barriers prevent writes of a shadow run. A declared tool asks the policy before it runs. A chat that offers an
undeclared tool is stopped before its first token. And if the policy answers no writing call, a reply that contains one,
as an object or in its text, never reaches the agent. The first barrier needs the run's context: a call from a thread
without it may be production's, and runs.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from flywheel.arguments import Reader, arguments_of
from flywheel.calls import CalledTools
from flywheel.errors import UnsafeTool, describe
from flywheel.run import Run
from flywheel.transport import current_run
from flywheel.workflow import is_async

log = logging.getLogger("flywheel")
F = TypeVar("F", bound=Callable[..., Any])
Recording = list[tuple[str, str, Any]]  # name, arguments, result of production's calls
_declared: dict[str, bool] = {}  # whether a tool only reads, by name: chats contain only the names of tools
judging = ContextVar("flywheel_judging", default=False)  # whether the reward function chats, for example with a judge
recording: ContextVar[Recording | None] = ContextVar("flywheel_recording", default=None)


@contextmanager
def recorded_in(calls: Recording | None) -> Iterator[None]:
    """Record the tool calls of a block; None: record none."""
    token = recording.set(calls)
    try:
        yield
    finally:
        recording.reset(token)


def declare(name: str, *, read_only: bool) -> None:
    """Declare whether a tool, by the name that the model sees, only reads. Of two declarations the stricter one wins.

    >>> declare("docs_search", read_only=True)
    >>> is_read_only("docs_search"), is_read_only("docs_unknown")
    (True, None)
    """
    _declared[name] = read_only and _declared.get(name, True)


def is_read_only(name: str) -> bool | None:
    """Return a tool's declaration; None if there is none."""
    return _declared.get(name)


def tool(*, read_only: bool, name: str | None = None) -> Callable[[F], F]:
    """Declare a function, sync or async, as a tool. In a shadow run, the policy answers calls of a writing tool.

    name: the tool's name for the model, if it is not the function's.

    >>> @tool(read_only=False)
    ... def refund(order: str) -> str:
    ...     return "refunded"
    >>> refund("A1")
    'refunded'
    """

    def decorate(function: F) -> F:
        known = name or function.__name__
        declare(known, read_only=read_only)
        return guarded(function, known, read_only)

    return decorate


def guarded(
    function: F, name: str, read_only: bool, read: Reader = arguments_of, signature: inspect.Signature | None = None
) -> F:
    """Wrap a function by the policy of the run that calls it. read: returns the tool's arguments of a call."""
    arguments = functools.partial(read, signature or inspect.signature(function))

    @functools.wraps(function)
    async def asynchronous(*args: Any, **kwargs: Any) -> Any:
        policy = _policy(name, read_only)
        if policy is not None:
            found = policy.attempt(name, arguments(args, kwargs))
            return await found if inspect.isawaitable(found) else found
        result = await function(*args, **kwargs)
        _record(name, arguments(args, kwargs), result)
        return result

    @functools.wraps(function)
    def synchronous(*args: Any, **kwargs: Any) -> Any:
        policy = _policy(name, read_only)
        if policy is not None:
            return policy.attempt(name, arguments(args, kwargs))
        result = function(*args, **kwargs)
        _record(name, arguments(args, kwargs), result)
        return result

    return asynchronous if is_async(function) else synchronous  # type: ignore[return-value]


def _policy(name: str, read_only: bool) -> ShadowGuard | None:
    """Return the guard that must answer; None if the tool may run. Declarations of the name count, too."""
    run = current_run.get()
    guard = run.guard if run is not None else None
    if not isinstance(guard, ShadowGuard) or (read_only and _declared.get(name, True)):
        return None
    return guard


def _record(name: str, arguments: Mapping[str, Any], result: Any) -> None:
    if (found := recording.get()) is None:
        return
    try:
        found.append((name, _canonical(arguments), copy.deepcopy(result)))
    except Exception as exc:  # noqa: BLE001 — a user's values: production continues
        log.warning("a call of the tool %s cannot be recorded: %s", name, describe(exc))


def _canonical(arguments: Mapping[str, Any]) -> str:
    return json.dumps(dict(arguments), sort_keys=True, default=repr)


class ReadOnlyTools:
    """The default policy: a shadow run that calls a writing tool ends as unsafe, and is not trained on.

    >>> ReadOnlyTools().answer("refund", {}, [])
    Traceback (most recent call last):
    flywheel.errors.UnsafeTool: refund writes, and shadow runs only read: nothing of this run is trained
    """

    answers_writes = False  # whether a reply with a writing call may reach the agent
    rewards_attempts = False  # whether the reward function gets a run that ended at a writing call
    records = False  # whether production's results are needed

    def answer(self, name: str, arguments: Mapping[str, Any], recorded: Recording) -> Any:
        """Return the result of a writing call. Raises UnsafeTool if there is none."""
        raise UnsafeTool(name, f"{name} writes, and shadow runs only read: nothing of this run is trained")


class RecordedTools(ReadOnlyTools):
    """A writing call gets production's result for the same name and arguments; any other one ends the run there.

    The reward function then gets no reply, and finds the call in `run.attempts`.

    >>> RecordedTools().answer("refund", {"order": "A1"}, [("refund", '{"order": "A1"}', "refunded")])
    'refunded'
    """

    answers_writes = True
    rewards_attempts = True
    records = True

    def answer(self, name: str, arguments: Mapping[str, Any], recorded: Recording) -> Any:
        """Return production's result."""
        wanted = _canonical(arguments)
        for known, said, result in recorded:
            if (known, said) == (name, wanted):
                return copy.deepcopy(result)
        raise UnsafeTool(name, f"production did not call {name} with {wanted}: the run ends here")


class SubstituteTools(ReadOnlyTools):
    """A writing call runs a function instead; a tool without one ends the run as unsafe.

    >>> SubstituteTools({"refund": lambda order: "refunded"}).answer("refund", {"order": "A1"}, [])
    'refunded'
    """

    answers_writes = True

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._functions = dict(functions)

    def answer(self, name: str, arguments: Mapping[str, Any], recorded: Recording) -> Any:
        """Return the function's result for the same arguments, by name."""
        if name not in self._functions:
            raise UnsafeTool(name, f"{name} writes and has no substitute: give SubstituteTools({{'{name}': function}})")
        return self._functions[name](**arguments)


class ShadowGuard:
    """The guard of a shadow run, for transport and tools. After one refusal, it refuses everything the agent does."""

    def __init__(self, run: Run, policy: ReadOnlyTools, recorded: Recording) -> None:
        self.unsafe: UnsafeTool | None = None
        self._run = run
        self._policy = policy
        self._recorded = recorded
        self.rewards = False  # whether the reward function gets the run although it was ended

    def attempt(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Answer a call of a declared writing tool. Raises UnsafeTool."""
        if self.unsafe is not None:
            raise self.unsafe
        self._run.attempts.append((name, dict(arguments)))
        try:
            return self._policy.answer(name, arguments, self._recorded)
        except UnsafeTool as exc:
            self.rewards = self._policy.rewards_attempts
            self.unsafe = exc
            raise

    def check_request(self, body: Mapping[str, Any]) -> None:
        """Check a chat before it is sent. Raises UnsafeTool for an undeclared tool."""
        self._again()
        offered = [one.get("function", one) for one in body.get("tools") or []] + list(body.get("functions") or [])
        for one in () if judging.get() else offered:
            name = str(one.get("name") or one.get("type") or "")
            if name not in _declared:
                self._refuse(
                    name,
                    f"the agent offers the tool {name!r}, which nobody declared: decorate it with @flywheel.tool("
                    f"read_only=…), pass it through flywheel.guard, or say flywheel.declare({name!r}, read_only=…)",
                )

    def watch_reply(self) -> Callable[[bytes], None]:
        """Return a check for a reply's pieces, which raises UnsafeTool at a writing call if the policy answers none."""
        if self._policy.answers_writes or judging.get():
            return lambda piece: None
        called = CalledTools()

        def see(piece: bytes) -> None:
            self._again()
            for name in called.see(piece):
                if _declared.get(name) is False:
                    self._run.attempts.append((name, {}))
                    self._refuse(name, f"{name} writes, and shadow runs only read: nothing of this run is trained")

        return see

    def _refuse(self, name: str, message: str) -> None:
        self.unsafe = UnsafeTool(name, message)
        raise self.unsafe

    def _again(self) -> None:
        if self.unsafe is not None and not judging.get():
            raise self.unsafe
