"""python -m flywheel learn|evaluate MODULE:FUNCTION TASKS. Exit status 2: an argument is wrong; 130: Ctrl-C."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flywheel.config import LearnConfig
from flywheel.errors import ConfigError, FlywheelError
from flywheel.evaluation import evaluate
from flywheel.learning import learn


def main(arguments: list[str] | None = None) -> int:
    """Run a command; its result is one line of JSON on standard output."""
    parser = argparse.ArgumentParser("python -m flywheel")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("learn", "run a workflow over tasks and reward its runs"),
        ("evaluate", "score a workflow over tasks"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("workflow", metavar="MODULE:FUNCTION")
        command.add_argument("tasks", metavar="TASKS", help="a .jsonl or .csv file")
        command.add_argument("--url", help="the explorer's address (default: FLYWHEEL_URL)")
        command.add_argument("--runs", type=int, help="runs of each task")
        command.add_argument("--at-once", type=int, help="runs in flight")
    commands.choices["learn"].add_argument(
        "--name", help="name of the tasks in the ledger, and of the folder runs/NAME"
    )
    commands.choices["learn"].add_argument("--epochs", type=int, help="passes over the tasks")
    commands.choices["learn"].add_argument("--eval", metavar="TASKS", help="tasks that are only evaluated")
    commands.choices["learn"].add_argument("--config", metavar="FILE", help="a JSON file with fields of LearnConfig")
    commands.choices["evaluate"].add_argument(
        "--version", type=int, help="version of the model (default: the one in service)"
    )
    args = parser.parse_args(arguments)
    try:
        print(json.dumps(_learn(args) if args.command == "learn" else _evaluate(args)))
    except FlywheelError as exc:
        print(f"flywheel: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, ConfigError) else 1
    except KeyboardInterrupt:
        print("flywheel: interrupted", file=sys.stderr)
        return 130
    return 0


def _learn(args: argparse.Namespace) -> dict[str, Any]:
    config = LearnConfig.load(args.config) if args.config else LearnConfig()
    config = config.with_options(**_given(args, name="name", epochs="epochs", runs="runs_per_task", at_once="at_once"))
    return asdict(learn(_load(args.workflow), args.tasks, url=args.url, eval_tasks=args.eval, config=config))


def _evaluate(args: argparse.Namespace) -> dict[str, Any]:
    options = _given(args, url="url", version="model", runs="runs_per_task", at_once="at_once")
    return asdict(evaluate(_load(args.workflow), args.tasks, **options))


def _given(args: argparse.Namespace, **names: str) -> dict[str, Any]:
    """Return the options that were given, by their names in Python."""
    return {ours: getattr(args, said) for said, ours in names.items() if getattr(args, said) is not None}


def _load(path: str) -> Callable[..., Any]:
    """Import the function MODULE:FUNCTION, also from the current folder. Raises ConfigError."""
    module, _, name = path.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(f"{path!r} names no function: give MODULE:FUNCTION ({exc})") from exc
    if not callable(found):
        raise ConfigError(f"{path!r} is no function")
    return found  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main())
