"""What `python -m examples.NAME` does: the base model, the processes, an evaluation, learning, another evaluation.

It evaluates version 0 on held-out tasks, learns, evaluates the version that is in service then, and leaves report.html
and report.json in --root. The last line that it prints is JSON. With --url it does the same on a server that runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import flywheel
from flywheel.run import Run
from flywheel.workflow import Caller, score

from examples.serving import make_model, make_root, running, write_config
from examples.tiny_model import Recipe, folder_of
from shared.errors import StartupError

MINUTES = 7.0
RETRY_S = 30.0  # for an explorer that does not answer
TRIES = 10  # what is left to train on makes a few more versions
Task = Mapping[str, Any]


@dataclass(frozen=True)
class Example:
    """One example: what it runs, on which tasks, and what makes a tiny model learn it on this machine."""

    name: str  # of its folder
    about: str  # one line, shown first
    workflow: Callable[..., Any]  # of (task, model) or (task, model, run), as flywheel.learn takes it
    judge: Callable[..., Any]  # of (task, reply), the reward; as flywheel.learn takes it
    tasks: Sequence[Task]
    held_out: Sequence[Task]
    recipe: Callable[[], Recipe]  # called when the model is not cached
    engine: Mapping[str, Any]  # section of flywheel.yaml
    trainer: Mapping[str, Any]  # section of flywheel.yaml
    learn: Mapping[str, Any] = field(default_factory=dict)  # options of flywheel.learn
    parts: Callable[[Any], Sequence[Run]] = lambda _: ()  # of a reply: runs beside the run that the judge rewarded
    variant: tuple[str, ...] = ()  # what else names the cached model: options that the recipe depends on


def parser(name: str, about: str) -> argparse.ArgumentParser:
    """The options that all examples take."""
    found = argparse.ArgumentParser(f"python -m examples.{name}", description=about)
    found.add_argument("--minutes", type=float, default=MINUTES, help="how long to learn")
    found.add_argument("--seed", type=int, default=0, help="seed of the order of tasks and of training")
    found.add_argument("--url", help="a Flywheel that runs, instead of a tiny model on this machine")
    found.add_argument("--model", default="agent", help="with --url, the model's name there")
    found.add_argument("--shuffled", action="store_true", help="give rewards to other tasks' runs: nothing is learned")
    found.add_argument("--held-out", type=int, metavar="N", help="evaluate on the first N held-out tasks alone")
    found.add_argument("--root", type=Path, default=Path(f"{name}-data"), help="where everything is kept (made anew)")
    return found


def run(example: Example, args: argparse.Namespace) -> int:
    """Run the example. Returns the exit status."""
    print(example.about, file=sys.stderr, flush=True)
    try:
        make_root(args.root)
        with _served(example, args) as url:
            outcome = _play(example, args, url)
    except (StartupError, flywheel.FlywheelError) as error:
        print(f"{example.name}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(outcome), flush=True)
    return 0


@contextlib.contextmanager
def _served(example: Example, args: argparse.Namespace) -> Iterator[str]:
    """The address of the explorer."""
    if args.url:
        yield args.url
        return
    model = make_model(example.recipe, folder_of(example.name, *example.variant), args.root)
    url, file = write_config(args.root, model, example.engine, {**example.trainer, "seed": args.seed})
    print(f"starting engine, explorer and trainer; their log is {file.with_name('flywheel.log')}", file=sys.stderr)
    with running(url, file):
        yield url


def _play(example: Example, args: argparse.Namespace, url: str) -> dict[str, Any]:
    began = time.monotonic()
    held_out = example.held_out[: args.held_out]
    with flywheel.Client(url, model=args.model, retry_s=RETRY_S) as client:
        before = evaluate(example, client, held_out)
        _say("before", before)
        report = asyncio.run(_learn(example, args, url))
        after = evaluate(example, client, held_out)
        _say("after", after)
        status = client.status()
    report.evaluations = [replace(before, after_runs=0), replace(after, after_runs=report.runs)]
    report.write(args.root, args.root / "journal.jsonl")
    return {
        "example": example.name,
        "seed": args.seed,
        "shuffled": args.shuffled,
        "before": _plain(before),
        "after": _plain(after),
        "reward_first": report.reward_first,
        "reward_last": report.reward_last,
        "runs": report.runs,
        "failures": report.failures,
        "versions": status.serving,
        "rows": status.raw.get("rows"),
        "seconds_learning": round(report.seconds, 1),
        "seconds_waited": round(report.waited_s, 1),
        "seconds": round(time.monotonic() - began, 1),
    }


async def _learn(example: Example, args: argparse.Namespace, url: str) -> flywheel.Report:
    """Learn until the time is up."""
    options = {"name": example.name, "epochs": 10_000, "seed": args.seed, "seconds": 60 * args.minutes, **example.learn}
    judge = Shuffled(example, args.seed) if args.shuffled else example.judge
    async with flywheel.AsyncClient(url, model=args.model, retry_s=300.0) as client:
        return await flywheel.alearn(
            example.workflow, example.tasks, client=client, judge=judge, folder=args.root, **options
        )


def evaluate(example: Example, client: flywheel.Client, tasks: Sequence[Task]) -> flywheel.Evaluation:
    """What the version in service earns on these tasks: greedy, unrecorded, pinned to that version."""
    params = {**example.learn.get("params", {}), "temperature": 0.0}
    options: dict[str, Any] = {"url": client.url, "judge": example.judge, "at_once": 16, "params": params}
    return of_version_in_service(
        client, lambda model: flywheel.evaluate(example.workflow, tasks, model=model, **options)
    )


def of_version_in_service(
    client: flywheel.Client, evaluation: Callable[[flywheel.Model], flywheel.Evaluation]
) -> flywheel.Evaluation:
    """The evaluation of the version in service; anew when another one has come into its place meanwhile."""
    for _ in range(TRIES):
        version = client.status().serving
        found = evaluation(client.model(version))
        if not found.failed or client.status().serving == version:
            break
    return found


def _plain(found: flywheel.Evaluation) -> dict[str, Any]:
    figures = {"reward": found.mean, "standard_error": found.standard_error, **found.metrics}
    rounded = {name: round(value, 4) for name, value in figures.items()}
    return {"version": found.version, "n": found.n, "failed": found.failed, **rounded}


def _say(when: str, found: flywheel.Evaluation) -> None:
    metrics = "".join(f", {name} {value:.2f}" for name, value in found.metrics.items())
    print(
        f"{when}: version {found.version}, reward {found.mean:.3f} ± {found.standard_error:.3f} "
        f"on {found.n} held-out tasks{metrics}, {found.failed} failed",
        file=sys.stderr,
        flush=True,
    )


class Shuffled:
    """A judge that gives each run the reward of an earlier run of another task: rewards that say nothing."""

    def __init__(self, example: Example, seed: int) -> None:
        self._judge = Caller(example.judge, ("task", "reply", "run"), None)
        self._parts = example.parts
        self._draw = random.Random(seed)
        self._earlier: deque[tuple[str, float]] = deque(maxlen=256)

    async def __call__(self, task: Task, reply: Any, run: Any) -> float | None:
        """None, which leaves the run unrewarded, while no other task has been rewarded."""
        honest = await score(reply, self._judge, task, run)
        key = json.dumps(task, sort_keys=True, default=repr)
        others = [value for other, value in self._earlier if other != key]
        for part in self._parts(reply) if others else ():
            part.reward(self._draw.choice(others))
        if honest is not None and honest.value is not None:
            self._earlier.append((key, honest.value))
        return self._draw.choice(others) if others else None
