"""`flywheel demo`: the whole loop on this machine; `flywheel demo NAME`: one of the examples."""

from __future__ import annotations

import math
import os
from argparse import REMAINDER, ArgumentParser, Namespace
from pathlib import Path
from typing import NoReturn

from shared.errors import ConfigError, StartupError

HELP = "run the whole loop on this machine: a support desk that learns, or an example"
LESSONS = ("ppo", "reinforce_pp", "spo", "grpo", "rloo", "step_grpo", "raft", "sft", "dpo", "kto", "hint", "distill")
REPOSITORY = Path(__file__).parents[2]


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="an example (default: the support desk)")
    parser.add_argument("options", nargs=REMAINDER, help="options of the example; see flywheel demo NAME --help")
    parser.add_argument("--list", action="store_true", help="list the examples")
    parser.add_argument("--json", action="store_true", help="print no live view, and one line of JSON at the end")
    parser.add_argument(
        "--minutes",
        type=float,
        default=None,
        help="run for this long once the engine is ready, instead of a number of episodes",
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path("demo-data"),
        help="folder for the demo's data; emptied at start (default: demo-data)",
    )
    parser.add_argument(
        "--algorithm",
        choices=LESSONS,
        default="ppo",
        help="the trainer's algorithm; customers send the feedback that it learns from (default: ppo)",
    )
    parser.add_argument(
        "--kind",
        choices=("full", "lora"),
        default="full",
        help="train all weights (full, the default) or an adapter (lora)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of customers and training (default: 0)")


def run(args: Namespace) -> int:
    """Run the demo, or an example. Raises ConfigError."""
    if args.list:
        for name, about in examples().items():
            print(f"{name:14} {about}")  # noqa: T201
        return 0
    if args.name:
        _require_no_options(args)
        run_example(args.name, args.options)
    if args.minutes is not None and not 0 < args.minutes < math.inf:
        raise ConfigError(f"--minutes {args.minutes:g} is no time; give a number above 0")
    from services.demo import Plan, run_demo

    plan = Plan(args.algorithm, args.kind, args.seed)
    return run_demo(root=args.root, json_output=args.json, minutes=args.minutes, plan=plan)


def _require_no_options(args: Namespace) -> None:
    """Raise ConfigError for options before an example's name: they are the support desk's."""
    parser = ArgumentParser()
    add_arguments(parser)
    defaults = vars(parser.parse_args([]))
    before = [name for name in defaults if name not in ("name", "options") and getattr(args, name) != defaults[name]]
    if before:
        raise ConfigError(
            f"--{before[0]} stands before {args.name!r}, where it is an option of the support desk; write the "
            f"example's options behind its name; `flywheel demo {args.name} --help` lists them"
        )


def examples() -> dict[str, str]:
    """Return the examples, with the first line of each one's program."""
    programs = sorted((REPOSITORY / "examples").glob("*/__main__.py"))
    first_lines = {file.parent.name: file.read_text(encoding="utf-8").splitlines()[0] for file in programs}
    return {name: line.strip('"').partition(": ")[2] for name, line in first_lines.items()}


def run_example(name: str, options: list[str]) -> NoReturn:
    """Replace this process by the example, under the Python that has its frameworks, so that both end together.

    Raises StartupError.
    """
    if name not in examples():
        raise StartupError(f"no example is named {name!r}; the examples are {', '.join(examples())}")
    python = REPOSITORY / ".venv-examples" / "bin" / "python"
    if not python.exists():
        raise StartupError(
            f"the frameworks of the examples are not installed ({python} is missing); run `make examples`"
        )
    path = [str(REPOSITORY), str(REPOSITORY / "agent_sdk"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    os.execve(python, [str(python), "-P", "-m", f"examples.{name}", *options], environment)
