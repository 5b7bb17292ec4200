"""The program behind `python -m examples.NAME`: starts the processes, evaluates, learns, and evaluates again.

The first evaluation measures the version in service before learning, which is version 0 of a new server. The second
measures the version in service afterwards. The program writes report.html and report.json to --root and prints a line
of JSON last. With --url it uses a running server, whose engine may still be starting, and starts none.
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

from examples.serving import loopback_without_proxy, make_model, make_root, running, write_config
from examples.tiny_model import Recipe, folder_of
from shared.errors import StartupError

MINUTES = 7.0
RETRY_S = 30.0  # how long calls to an unreachable explorer are retried
READY_S = 600.0  # how long a server whose engine still starts is waited for
TRIES = 10  # of an evaluation; rows left after learning can still make a few versions
SERVED = {"runs_per_task": 8, "at_once": 16, "timeout_s": 600.0, "params": {"max_tokens": 256}}
Task = Mapping[str, Any]


@dataclass(frozen=True)
class Example:
    """One example: its workflow, its tasks, and the settings with which a tiny model learns on this machine."""

    name: str  # of the example's folder
    about: str  # one line, printed first
    workflow: Callable[..., Any]  # (task, model) or (task, model, run), as in flywheel.learn
    judge: Callable[..., Any]  # (task, reply) → the reward, as in flywheel.learn
    tasks: Sequence[Task]
    held_out: Sequence[Task]
    recipe: Callable[[], Recipe]  # called if the model is not cached
    engine: Mapping[str, Any]  # section of flywheel.yaml
    trainer: Mapping[str, Any]  # section of flywheel.yaml
    learn: Mapping[str, Any] = field(default_factory=dict)  # options of flywheel.learn for the tiny model
    served: Mapping[str, Any] = field(default_factory=lambda: dict(SERVED))  # the same with --url
    parts: Callable[[Any], Sequence[Run]] = lambda _: ()  # (reply) → further runs that need a reward
    variant: tuple[str, ...] = ()  # options that the recipe depends on; part of the cached model's name


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("give a whole number of 1 or more")
    return int(text)


def parser(name: str, about: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all examples share."""
    found = argparse.ArgumentParser(f"python -m examples.{name}", description=about)
    found.add_argument("--minutes", type=float, default=MINUTES, help="how long to learn, in minutes")
    found.add_argument("--seed", type=int, default=0, help="seed of the order of tasks and of training")
    found.add_argument("--url", help="address of a running Flywheel, instead of a tiny model on this machine")
    found.add_argument("--model", default="agent", help="with --url, the model's name there")
    found.add_argument("--config", type=Path, metavar="FILE", help="JSON file of flywheel.learn's options, to use here")
    found.add_argument(
        "--shuffled", action="store_true", help="a control: give each run the reward of another task's run"
    )
    found.add_argument("--held-out", type=_count, metavar="N", help="evaluate only on the first N held-out tasks")
    found.add_argument(
        "--root", type=Path, default=Path(f"{name}-data"), help="folder for all output; emptied at start"
    )
    return found


def run(example: Example, args: argparse.Namespace) -> int:
    """Run the example. Returns the exit status."""
    print(example.about, file=sys.stderr, flush=True)
    return in_one_line(example.name, lambda: _run(example, args))


def in_one_line(name: str, work: Callable[[], dict[str, Any]]) -> int:
    """Print what an example found as a line of JSON, or its error as a line. Returns the exit status."""
    try:
        found = work()
    except (StartupError, flywheel.FlywheelError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        return 130
    print(json.dumps(found), flush=True)
    return 0


def _run(example: Example, args: argparse.Namespace) -> dict[str, Any]:
    example = replace(example, learn=learn_options(example.served if args.url else example.learn, args.config))
    make_root(args.root)
    with _served(example, args) as url:
        return _play(example, args, url)


def learn_options(own: Mapping[str, Any], file: Path | None) -> Mapping[str, Any]:
    """Return an example's options of flywheel.learn, replaced by those that a file has. Raises flywheel.ConfigError."""
    if file is None:
        return own
    config = flywheel.LearnConfig.load(file)
    given = json.loads(file.read_text(encoding="utf-8-sig"))
    options = {**own, **{name: getattr(config, name) for name in given}}
    if "params" in given:  # those that the file does not name, such as max_tokens, stay the example's
        options["params"] = {**own.get("params", {}), **config.params}
    return options


@contextlib.contextmanager
def _served(example: Example, args: argparse.Namespace) -> Iterator[str]:
    """Yield the explorer's address."""
    if args.url:
        with loopback_without_proxy():  # its own pages, such as the shop's, are on loopback
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
        _print_evaluation("before", before)
        if not before.n:
            reason = f"none of {before.failed} runs gave a reward: {before.main_failure}"
            raise StartupError(f"before learning, {reason}; there would be nothing to compare with")
        report = asyncio.run(_learn(example, args, url))
        after = evaluate(example, client, held_out)
        _print_evaluation("after", after)
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
        "quarantined": status.raw.get("quarantined"),
        "seconds_learning": round(report.seconds, 1),
        "seconds_waited": round(report.waited_s, 1),
        "seconds": round(time.monotonic() - began, 1),
    }


async def _learn(example: Example, args: argparse.Namespace, url: str) -> flywheel.Report:
    """Learn until the time limit."""
    options = {"name": example.name, "epochs": 10_000, "seed": args.seed, "seconds": 60 * args.minutes, **example.learn}
    judge = Shuffled(example, args.seed) if args.shuffled else example.judge
    async with flywheel.AsyncClient(url, model=args.model, retry_s=300.0) as client:
        return await flywheel.alearn(
            example.workflow, example.tasks, client=client, judge=judge, folder=args.root, **options
        )


def evaluate(example: Example, client: flywheel.Client, tasks: Sequence[Task]) -> flywheel.Evaluation:
    """Evaluate the version in service on these tasks: greedy, unrecorded, pinned to that version."""
    params = {**example.learn.get("params", {}), "temperature": 0.0}
    options: dict[str, Any] = {"url": client.url, "judge": example.judge, "at_once": 16, "params": params}
    return of_version_in_service(
        client, lambda model: flywheel.evaluate(example.workflow, tasks, model=model, **options)
    )


def of_version_in_service(
    client: flywheel.Client, evaluation: Callable[[flywheel.Model], flywheel.Evaluation]
) -> flywheel.Evaluation:
    """Evaluate the version in service. Repeats an evaluation with failures if a newer version replaced it meanwhile.

    Waits for an engine before, as `flywheel up` may still be starting. Raises flywheel.FlywheelError if none serves.
    """
    client.status()  # an address at which nobody answers is reported sooner
    client.wait_ready(READY_S)
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


def _print_evaluation(when: str, found: flywheel.Evaluation) -> None:
    metrics = "".join(f", {name} {value:.2f}" for name, value in found.metrics.items())
    print(
        f"{when}: version {found.version}, reward {found.mean:.3f} ± {found.standard_error:.3f} "
        f"on {found.n} held-out tasks{metrics}, {found.failed} failed",
        file=sys.stderr,
        flush=True,
    )


class Shuffled:
    """A control judge: gives each run the reward of an earlier run of another task, which carries no information."""

    def __init__(self, example: Example, seed: int) -> None:
        self._judge = Caller(example.judge, ("task", "reply", "run"), None)
        self._timeout_s = float(example.learn.get("timeout_s", flywheel.LearnConfig.timeout_s))
        self._parts = example.parts
        self._draw = random.Random(seed)
        self._earlier: deque[tuple[str, float]] = deque(maxlen=256)

    async def __call__(self, task: Task, reply: Any, run: Any) -> float | None:
        """Return None, which leaves the run without a reward, until another task has a reward."""
        honest = await score(reply, self._judge, task, run, self._timeout_s)
        key = json.dumps(task, sort_keys=True, default=repr)
        others = [value for other, value in self._earlier if other != key]
        for part in self._parts(reply):
            part.forget()  # the honest judge may have rewarded it
            if others:
                part.reward(self._draw.choice(others))
        if honest is not None and honest.value is not None:
            self._earlier.append((key, honest.value))
        return self._draw.choice(others) if others else None
