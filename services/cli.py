"""The `flywheel` command. Parses first; heavy imports come after, so that --help and config errors are instant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shared.errors import FlywheelError


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, build, run. Returns the exit status: 0 done, 1 cannot run, 2 wrong call or configuration."""
    args = _parser().parse_args(argv)
    try:
        return _run(args)
    except FlywheelError as error:
        print(f"flywheel: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flywheel", description="Makes the model behind an agent better while it is in use."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="the whole loop on this machine: a support desk that learns")
    demo.add_argument("--json", action="store_true", help="end with one JSON line instead of the live view")
    demo.add_argument("--minutes", type=float, default=None, help="how long to run, from engine ready")
    demo.add_argument("--root", type=Path, default=Path("demo-data"), help="where the demo keeps its data (made anew)")
    demo.add_argument("--seed", type=int, default=0, help="seed of customers and training")

    for name, help_text in (
        ("up", "engines, explorer and trainer on this machine, supervised"),
        ("engine", "one vLLM engine"),
        ("explorer", "the service that agents talk to"),
        ("trainer", "the service that learns"),
        ("status", "rows by state, versions, engines, trainer"),
        ("versions", "every version and its state"),
        ("rewards", "apply a changed reward section to rows that are not trained yet"),
        ("export", "recorded conversations with rewards as JSONL or Parquet"),
        ("import", "record conversations from a file, with rewards or as demonstrations"),
        ("archive", "move old rows that were trained on or discarded into files"),
        ("erase", "delete a key's, task's or message's tokens, texts and feedback"),
        ("migrate", "bring the ledger to this version's schema, or copy it to another database"),
    ):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("-c", "--config", required=True, metavar="FILE", help="the configuration file")
        if name == "engine":
            command.add_argument("--name", default=None, help="which of explorer.engines (default: the first)")
        if name == "explorer":
            command.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # one of explorer.workers
        if name == "export":
            command.add_argument("--out", required=True, metavar="FILE", type=Path, help="ends in .jsonl or .parquet")
            command.add_argument("--state", default=None, help="only rows in this state, e.g. CONSUMED")
            command.add_argument("--min-reward", type=float, default=None, help="only rows rewarded at least so")
            command.add_argument("--task", default=None, help="only this task's rows")
            command.add_argument("--tokens", action="store_true", help="token ids and logprobs too, for `import`")
        if name == "import":
            command.add_argument("file", metavar="FILE", type=Path, help="ends in .jsonl, .jsonl.gz or .parquet")
            command.add_argument("--reward", type=float, default=None, help="of rows that bring none: demonstrations")
            command.add_argument("--commit", action="store_true", help="make rewarded rows ready for training at once")
        if name == "archive":
            command.add_argument("--to", required=True, metavar="FOLDER", type=Path, help="where the files go")
            command.add_argument("--older-than-days", type=float, default=None, help="only rows older than this")
            command.add_argument(
                "--keep-gb", type=float, default=None, help="as many as the ledger is larger than this"
            )
        if name == "erase":
            whose = command.add_argument_group("whose rows (all that are named must agree)")
            for option in ("key", "task", "run", "message"):
                whose.add_argument(f"--{option}", default=None)
        if name == "migrate":
            command.add_argument(
                "--to", metavar="URL", default=None, help="copy all rows to this empty database, and verify"
            )
        if name == "up":
            command.add_argument(
                "--without",
                action="append",
                default=[],
                choices=("engines", "explorer", "trainer"),
                help="leave this part out",
            )
    return parser


def _run(args: argparse.Namespace) -> int:
    if args.command == "demo":
        from services.demo import run_demo

        return run_demo(root=args.root, json_output=args.json, minutes=args.minutes, seed=args.seed)

    from shared.config import load_config

    config = load_config(args.config)
    if args.command == "up":
        from services.local import run_local

        return run_local(config, Path(args.config), without=args.without)
    if args.command == "engine":
        from services.engine.launch import run_engine

        return run_engine(config, args.name)
    if args.command == "explorer":
        from services.explorer import run_explorer

        return run_explorer(config, Path(args.config), is_worker=args.worker)
    if args.command == "trainer":
        from services.trainer import run_trainer

        return run_trainer(config)
    if args.command == "export":
        from services.transfer import export

        chosen = {"state": args.state, "min_reward": args.min_reward, "task_id": args.task}
        return export(config, args.out, **chosen, with_tokens=args.tokens)
    if args.command == "import":
        from services.transfer import import_rows

        return import_rows(config, args.file, reward=args.reward, commit=args.commit)
    if args.command == "archive":
        from services.transfer import archive

        return archive(config, args.to, older_than_days=args.older_than_days, keep_gb=args.keep_gb)
    if args.command == "erase":
        from services.operate import erase

        return erase(config, key_name=args.key, task_id=args.task, run_id=args.run, msg_id=args.message)
    if args.command == "migrate":
        from services.operate import migrate

        return migrate(config, args.to)
    from services.operate import print_status, print_versions, recompute_rewards

    return {"status": print_status, "versions": print_versions, "rewards": recompute_rewards}[args.command](config)


if __name__ == "__main__":
    sys.exit(main())
