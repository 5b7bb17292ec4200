"""Evaluation: runs a workflow on tasks without training on them: unrecorded, and pinned to one version."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from flywheel.addresses import origin_of
from flywheel.async_client import AsyncClient
from flywheel.errors import ConfigError, NothingCompared, describe
from flywheel.loops import run_alone
from flywheel.model import Model
from flywheel.report import Evaluation
from flywheel.run import AsyncRun
from flywheel.tasks import NamedTask, Task, load_tasks, new_task_id
from flywheel.threads import DaemonThreads
from flywheel.transport import Pin, current_pin, current_run
from flywheel.workflow import Caller, Function, score, within

_MOST_OF_CAUSE = 200  # maximum characters of a cause
_TRIES = 5  # attempts to evaluate a version in service while newer versions interrupt


@dataclass(frozen=True)
class Trial:
    """How an evaluation is run: its functions, and the parameters of chats."""

    workflow: Caller
    judge: Caller | None
    runs_per_task: int
    at_once: int
    timeout_s: float
    params: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.runs_per_task < 1:
            raise ConfigError(f"runs_per_task={self.runs_per_task}: give 1 or more")


async def try_version(client: AsyncClient, trial: Trial, tasks: list[NamedTask], model: Model) -> Evaluation:
    """Run the workflow on each task; failed runs give no reward, and are counted by cause."""
    gate, causes = asyncio.Semaphore(trial.at_once), Counter[str]()
    pinned = replace(model, run=None)
    pin = _pin_of(client, pinned)

    async def one(task: NamedTask) -> tuple[str, float | None, Mapping[str, float]]:
        async with gate:
            run = AsyncRun(client.explorer, new_task_id(), "eval", "once")
            run.pinned = pinned
            token, pinning = current_run.set(None), current_pin.set(pin)  # its chats belong to no run
            try:
                result = await within(trial.workflow(task.task, run.model, run), trial.timeout_s)
                reward = await score(result, trial.judge, task.task, run, trial.timeout_s)
                if reward is None or reward.figure is None:
                    causes["no reward"] += 1
            except ConfigError:
                raise
            except Exception as exc:  # noqa: BLE001 — a user's agent; the failure is counted
                causes[cause_of(exc)] += 1
                reward = None
            finally:
                current_run.reset(token)
                current_pin.reset(pinning)
        if reward is None or reward.figure is None:
            return task.digest, None, {}
        return task.digest, reward.figure, reward.metrics

    jobs = [asyncio.ensure_future(one(task)) for task in tasks for _ in range(trial.runs_per_task)]
    try:
        done = await asyncio.gather(*jobs)
    finally:
        for job in jobs:
            job.cancel()
    return replace(_summary(model.version, done), failures=dict(causes))


def _pin_of(client: AsyncClient, model: Model) -> Pin:
    """Return what makes the chats of model objects that outlive a run those of the evaluated model."""
    if model.connections is None:
        return Pin(origin_of(client.url), client.explorer.name, {"store": False}, {}, model)
    name = model.name if model.version is None else model.name.rpartition("@")[0]
    return Pin(origin_of(model.base_url), name, {**model.overrides, "model": model.name}, model.params, model)


async def try_serving(
    client: AsyncClient, trial: Trial, tasks: list[NamedTask], serving: Callable[[], Awaitable[int | None]]
) -> Evaluation:
    """Evaluate the version in service; again if another version replaced it and runs failed meanwhile.

    serving: returns the version in service.
    """
    for _ in range(_TRIES):
        version = await serving()
        model = client.model(version).untrained().with_params(**trial.params)
        found = await try_version(client, trial, tasks, model)
        if not found.failed or await serving() == version:
            break
    return found


async def _serving(client: AsyncClient) -> int | None:
    return (await client.status()).serving


def cause_of(error: Exception) -> str:
    """Format the error's type and the start of its message on one line.

    >>> cause_of(ValueError("no action in\\n'hello'"))
    "ValueError: no action in 'hello'"
    """
    return " ".join(describe(error).split())[:_MOST_OF_CAUSE]


def _summary(version: int | None, done: list[tuple[str, float | None, Mapping[str, float]]]) -> Evaluation:
    by_task: dict[str, list[float]] = defaultdict(list)
    metrics: dict[str, list[float]] = defaultdict(list)
    for digest, reward, parts in done:
        if reward is not None:
            by_task[digest].append(reward)
            for name, value in parts.items():
                metrics[name].append(value)
    n = sum(map(len, by_task.values()))
    mean, error = mean_and_error(by_task.values())
    return Evaluation(
        version=version,
        n=n,
        mean=mean,
        standard_error=error,
        solved=sum(max(some) >= 1.0 for some in by_task.values()) / max(1, len({digest for digest, _, _ in done})),
        metrics={name: sum(values) / len(values) for name, values in metrics.items()},
        failed=len(done) - n,
        rewards={digest: sum(some) / len(some) for digest, some in by_task.items()},
    )


def mean_and_error(by_task: Iterable[Sequence[float]]) -> tuple[float, float]:
    """Return the mean of all values and its standard error; 0 without values.

    The values of a task depend on one another, so the error is that of Miller 2024, arXiv 2411.00640, with a task as a
    cluster. With one task it is over the values.

    >>> mean_and_error([[0.0], [1.0]]), mean_and_error([[0.0, 0.0], [1.0, 1.0]])
    ((0.5, 0.5), (0.5, 0.5))
    """
    clusters = [some for some in by_task if some]
    n = sum(map(len, clusters))
    if not n:
        return 0.0, 0.0
    mean = math.fsum(value for some in clusters for value in some) / n
    if len(clusters) == 1:
        clusters = [[value] for value in clusters[0]]
    squares = math.fsum(math.fsum(value - mean for value in some) ** 2 for some in clusters)
    return mean, math.sqrt(squares * len(clusters) / max(1, len(clusters) - 1)) / n


async def aevaluate(
    workflow: Function,
    tasks: str | Path | Iterable[Task],
    *,
    model: Model | int | None = None,
    url: str | None = None,
    key: str | None = None,
    judge: Function | None = None,
    runs_per_task: int = 1,
    at_once: int = 32,
    timeout_s: float = 600.0,
    params: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Like evaluate, within a running event loop.

    >>> import inspect
    >>> inspect.iscoroutinefunction(aevaluate)
    True
    """
    async with AsyncClient(url, key=key) as client:
        with DaemonThreads(at_once, "flywheel-evaluate") as pool:
            offered = Caller(workflow, ("task", "model", "run"), pool)
            judging = None if judge is None else Caller(judge, ("task", "reply", "run"), pool)
            trial = Trial(offered, judging, runs_per_task, at_once, timeout_s, params or {})
            if model is None:
                return await try_serving(client, trial, load_tasks(tasks), partial(_serving, client))
            if not isinstance(model, Model):
                model = client.model(model)
            elif model.connections is not None:
                model = replace(model, connections=client.explorer.connections)
            chats = model.untrained() if model.connections is not None else model
            return await try_version(client, trial, load_tasks(tasks), chats.with_params(**trial.params))


def evaluate(workflow: Function, tasks: str | Path | Iterable[Task], **options: Any) -> Evaluation:
    """Run a workflow on tasks without training on them, and return the rewards.

    model: a Model, a version's number, or None for the version in service; if another version replaces it meanwhile,
    that one is evaluated instead. Further options: url, key, judge, runs_per_task, at_once, timeout_s, params (fields
    of chats, such as temperature). A run that exceeds timeout_s counts as failed; a sync function continues in its
    thread, which ends with the process.

    >>> evaluate(lambda task: 1.0, [], model=0, url="http://127.0.0.1:8010")
    Traceback (most recent call last):
    flywheel.errors.ConfigError: no task in []: give at least one
    """
    return run_alone(aevaluate(workflow, tasks, **options), "flywheel.aevaluate")


@dataclass(frozen=True)
class Comparison:
    """Two models on the same tasks: the mean difference b - a over tasks, its standard error, and both evaluations.

    >>> a = Evaluation(0, 2, 0.5, 0.0, 0.0, {}, rewards={"x": 0.5, "y": 0.5})
    >>> b = Evaluation(9, 2, 0.75, 0.0, 0.0, {}, rewards={"x": 1.0, "y": 0.5})
    >>> Comparison.of(a, b).difference
    0.25
    """

    difference: float
    standard_error: float
    a: Evaluation
    b: Evaluation

    @classmethod
    def of(cls, a: Evaluation, b: Evaluation) -> Comparison:
        """Compare by task; tasks with a reward of only one of them are ignored.

        Raises NothingCompared if none is left.
        """
        both = [b.rewards[digest] - reward for digest, reward in a.rewards.items() if digest in b.rewards]
        if not both:
            raise NothingCompared(_explain_failure(a, b))
        return cls(*mean_and_error([one] for one in both), a, b)


def _explain_failure(a: Evaluation, b: Evaluation) -> str:
    """Explain what is missing in both evaluations, and what to do."""
    remedy = "they have no task in common: evaluate both on the same"
    if not (a.rewards and b.rewards):
        remedy = (
            "make the runs succeed. A version of `model.kind: full` can be evaluated only while it is in service: keep "
            "the Evaluation made then, and use Comparison.of(a, b). `model.kind: lora` serves several versions at once"
        )
    return f"no task has a reward of both: {_failed(a)}; {_failed(b)}; {remedy}"


def _failed(found: Evaluation) -> str:
    model = "the model" if found.version is None else f"version {found.version}"
    cause = f", most of them by {found.main_failure}" if found.failures else ""
    return f"{model}: {found.failed} of {found.n + found.failed} runs gave no reward{cause}"


async def acompare(
    workflow: Function, tasks: str | Path | Iterable[Task], a: Model | int, b: Model | int, **options: Any
) -> Comparison:
    """Like compare, within a running event loop.

    >>> import inspect
    >>> inspect.iscoroutinefunction(acompare)
    True
    """
    both = [named.task for named in load_tasks(tasks)]  # read once, so that both are of the same tasks
    first = await aevaluate(workflow, both, model=a, **options)
    return Comparison.of(first, await aevaluate(workflow, both, model=b, **options))


def compare(
    workflow: Function, tasks: str | Path | Iterable[Task], a: Model | int, b: Model | int, **options: Any
) -> Comparison:
    """Evaluate two models, or versions, on the same tasks, and compare by task. options: of evaluate.

    Both must be served: two versions by an explorer of `model.kind: lora`, or each model by its own server. Raises
    NothingCompared if no task has a reward of both.

    >>> compare(lambda task: 1.0, [], 0, 1, url="http://127.0.0.1:8010")
    Traceback (most recent call last):
    flywheel.errors.ConfigError: no task in []: give at least one
    """
    return run_alone(acompare(workflow, tasks, a, b, **options), "flywheel.acompare")
