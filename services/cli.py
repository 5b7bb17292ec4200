"""The `flywheel` command: parses arguments, runs a command, and converts an error to one line and an exit status."""

from __future__ import annotations

import argparse
import errno
import io
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from services.commands import (
    archive,
    backup,
    convert_config,
    demo,
    engine,
    erase,
    explorer,
    export,
    export_model,
    import_,
    migrate,
    promote,
    rewards,
    rollback,
    status,
    traffic,
    train,
    trainer,
    up,
    versions,
)
from shared.errors import FlywheelError


class Command(Protocol):
    """The interface of a module in services/commands."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


COMMANDS: dict[str, Command] = {
    "demo": demo,
    "up": up,
    "engine": engine,
    "explorer": explorer,
    "trainer": trainer,
    "train": train,
    "status": status,
    "versions": versions,
    "promote": promote,
    "traffic": traffic,
    "rollback": rollback,
    "rewards": rewards,
    "export": export,
    "export-model": export_model,
    "import": import_,
    "archive": archive,
    "backup": backup,
    "erase": erase,
    "migrate": migrate,
    "convert-config": convert_config,
}


REMEDIES = {  # for errors of the file system in any command
    errno.EACCES: "correct its permissions, or choose another folder",
    errno.EPERM: "correct its permissions, or choose another folder",
    errno.EROFS: "make it writable, or choose another folder",
    errno.ENOTDIR: "choose a folder",
    errno.EEXIST: "choose another name",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0 done, 1 cannot run, 2 wrong call or configuration."""
    _replace_closed_outputs()
    args = build_parser().parse_args(argv)
    os.umask(0o077)  # prompts, weights and states are private to this user
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for characters that the terminal's encoding lacks
    try:
        status = COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        return 1
    except FlywheelError as error:
        print(f"flywheel: {error}", file=sys.stderr)
        return error.exit_status
    except OSError as error:
        if error.errno not in REMEDIES:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"flywheel: {where}{error.strerror}; {REMEDIES[error.errno]}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _replace_closed_outputs() -> None:
    """Open /dev/null for an output that the caller has closed, for which Python has None."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 — open until the process ends


def _reader_is_gone() -> bool:
    """Whether the output is a pipe whose reader, such as `head`, has ended."""
    output = select.poll()
    output.register(sys.stdout, 0)
    return bool(output.poll(0))


class _CommandParser(argparse.ArgumentParser):
    """Takes options also between the positional arguments of a command, except before those of an example."""

    _intermixed = True

    def add_argument(self, *names: Any, **about: Any) -> argparse.Action:
        self._intermixed = self._intermixed and about.get("nargs") != argparse.REMAINDER
        return super().add_argument(*names, **about)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if not self._intermixed or "--" in (args or ()):  # intermixed parsing loses what `--` means
            return super().parse_known_args(args, namespace)
        self._intermixed = False  # parse_known_intermixed_args calls this method
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._intermixed = True


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="flywheel", description="Improves the model behind an agent while the agent is in use."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.HELP))
    return parser


if __name__ == "__main__":
    sys.exit(main())
