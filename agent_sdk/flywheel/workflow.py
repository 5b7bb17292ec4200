"""Calls a user's functions: workflows, judges, reward functions; sync or async, with the arguments that they name."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from flywheel.errors import ConfigError, JudgeFailed, RunError, TimedOut
from flywheel.reward import Reward, read_reward

Function = Callable[..., Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """A return value for workflows: the reward, the answer for a judge, and metrics.

    >>> Result(response="42").response
    '42'
    """

    reward: float | None = None
    response: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def is_async(function: Function) -> bool:
    """Whether a call must be awaited: for a coroutine function, or an object whose `__call__` is one."""
    target = function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(target)


class Caller:
    """Calls one function with those of the offered arguments that it takes: by their names, or else by position.

    offered: the names of the arguments, in their order. A required parameter of another name gets the first value that
    no parameter names. Sync functions run in the pool, within the caller's context; None is the event loop's default
    pool, which waits for a function that hangs.

    >>> caller = Caller(lambda row, seed=0, model=None: row["n"] + 1, ("task", "model", "run"), None)
    >>> caller.arguments({"n": 1}, "agent", None)
    (({'n': 1},), {'model': 'agent'})
    """

    def __init__(self, function: Function, offered: tuple[str, ...], pool: Executor | None) -> None:
        self.function = function
        self._pool = pool
        self._is_async = is_async(function)
        self._places, self._named = _places(function, offered)

    def arguments(self, *values: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the values that the function takes by position, and those that it takes by name."""
        by_name = {name: values[place] for name, place in self._named.items()}
        return tuple(values[place] for place in self._places), by_name

    async def __call__(self, *values: Any) -> Any:
        """Return the function's result."""
        by_position, by_name = self.arguments(*values)
        call = functools.partial(self.function, *by_position, **by_name)
        if self._is_async:
            return await _without_exit(call())
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._pool, context.run, without_stop, call)
        return await _without_exit(result) if inspect.isawaitable(result) else result


def without_stop(call: Callable[[], Any]) -> Any:
    """Return the result of a call. A future cannot store StopIteration: awaiting it would never end."""
    try:
        return call()
    except StopIteration as exc:
        raise RuntimeError("the function raised StopIteration") from exc
    except SystemExit as exc:
        raise _exited(exc) from exc


async def _without_exit(call: Awaitable[T]) -> T:
    """Return the result of a call. SystemExit in a task would end the whole event loop."""
    try:
        return await call
    except SystemExit as exc:
        raise _exited(exc) from exc


def _exited(error: SystemExit) -> RunError:
    return RunError(f"the function raised SystemExit({error.code!r}): only its run ends")


def _places(function: Function, offered: tuple[str, ...]) -> tuple[tuple[int, ...], dict[str, int]]:
    """Return the places, among the offered ones, of the function's arguments by position and of those by name.

    Arguments go by position as far as possible: a decorated function may show names that its wrapper does not take.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin
        return (0,), {}
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    single = [p for p in parameters if p.kind not in several]
    others = [place for place, name in enumerate(offered) if name not in {p.name for p in single}]
    by_position: list[int] = []
    by_name: dict[str, int] = {}
    for parameter in single:
        if parameter.name in offered:
            place = offered.index(parameter.name)
        elif parameter.default is parameter.empty and others and parameter.kind is not parameter.KEYWORD_ONLY:
            place = others.pop(0)
        elif parameter.default is parameter.empty:
            required = [p.name for p in single if p.default is p.empty]
            raise _wrong_parameters(function, required, offered)
        else:
            continue
        is_next = len(by_position) == single.index(parameter)  # no parameter before it is left out
        if is_next and parameter.kind is not parameter.KEYWORD_ONLY:
            by_position.append(place)
        elif parameter.kind is not parameter.POSITIONAL_ONLY:
            by_name[parameter.name] = place
    if by_position or by_name:
        return tuple(by_position), by_name
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return tuple(range(len(offered))), {}
    raise _wrong_parameters(function, [], offered)


def _wrong_parameters(function: Function, required: list[str], offered: tuple[str, ...]) -> ConfigError:
    return ConfigError(
        f"{getattr(function, '__name__', function)!r} wants the arguments {required}: "
        f"write a function of {', '.join(offered)}, or of the first of them"
    )


async def within(call: Awaitable[T], timeout_s: float | None) -> T:
    """Return the result of a call, or raise TimedOut. A sync function continues in its thread, without a waiter.

    A call that ends as cancelled without a request from here raises RunError, and the work continues.
    """
    job = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({job}, timeout=timeout_s)
        if not done:
            raise TimedOut(f"it took longer than timeout_s={timeout_s:g}")
        if job.cancelled():
            raise RunError("it ended as cancelled (asyncio.CancelledError), and nobody had cancelled it")
        return job.result()
    finally:
        job.cancel()


def name_of(function: Function) -> str:
    """Return module:name of a function, which is the same at each start."""
    inner = getattr(function, "func", function)  # for a functools.partial
    return f"{getattr(inner, '__module__', '')}:{getattr(inner, '__qualname__', type(inner).__qualname__)}"


async def score(result: Any, judge: Caller | None, task: Any, run: Any, timeout_s: float) -> Reward | None:
    """Return the reward of a workflow's result; a judge's wins. timeout_s: how long the judge may take.

    Raises ConfigError for an invalid result, and JudgeFailed for a judge that takes longer.
    """
    response = result.response if isinstance(result, Result) else result
    if judge is not None:
        try:
            judged = read_reward(await within(judge(task, response, run), timeout_s), "the judge")
        except TimedOut as exc:
            raise JudgeFailed(f"the judge gave no verdict: {exc}") from exc
        if judged is not None and isinstance(result, Result):
            judged = replace(judged, metrics={**result.metrics, **judged.metrics})
            return read_reward(judged, "the workflow")
        return judged
    if isinstance(result, Result):
        given = run.outcome
        if result.reward is None and given is not None:
            result = Reward(given.value, {**given.metrics, **result.metrics}, given.comment)
        else:
            result = Reward(result.reward, result.metrics)
    if result is None and run.outcome is None:
        raise ConfigError("the workflow gave no reward, and there is no judge: return one, or give judge=")
    return run.outcome if result is None else read_reward(result, "the workflow")
