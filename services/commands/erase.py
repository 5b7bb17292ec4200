"""`flywheel erase`: deletes the ledger's data about someone, and names the versions that were trained on it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import closing

from services.commands import add_config, open_console, read_config, utf8
from shared.errors import ConfigError, StartupError
from shared.log import StageLogger

log = StageLogger("erase")
ANSWERS_AT_ONCE = 1000  # that one transaction deletes
_SCOPE = ("key", "task", "run", "message")
HELP = "delete tokens, texts and feedback of a key, task, run or message"


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    scope = parser.add_argument_group("which rows to erase; a row must match all that are given")
    for option in _SCOPE:
        scope.add_argument(f"--{option}", type=utf8, default=None)


def run(args: Namespace) -> int:
    """Erase the rows in the scope. Raises ConfigError without a scope, StartupError if it contains no row."""
    config = read_config(args)
    scope = {"key_name": args.key, "task_id": args.task, "run_id": args.run, "msg_id": args.message}
    if not any(scope.values()):
        raise ConfigError("erase: choose the rows with --key, --task, --run or --message")
    from shared.ledger import queries, transitions
    from shared.ledger.connect import Ledger

    rows, leased, versions, names = 0, 0, set[int](), set[str]()
    last_id: int | None = 0
    with closing(Ledger.open(config.ledger_url, create=False)) as ledger:
        while last_id is not None:
            with ledger.write() as connection:
                erased = transitions.erase(connection, after_id=last_id, **scope)
            rows, leased, last_id = rows + erased.rows, leased + erased.leased, erased.last_id
            versions |= erased.versions
            names |= erased.names
        about = ledger.fetch(lambda connection: queries.answers_about(connection, names))
        for start in range(0, len(about), ANSWERS_AT_ONCE):
            with ledger.write() as connection:
                transitions.forget_answers(connection, about[start : start + ANSWERS_AT_ONCE])
        if not ledger.empty_log():
            log.warning("the write-ahead log still holds erased text: another process reads; repeat this command")
    if not rows:
        named = ", ".join(
            f"--{option} {getattr(args, option)!r}" for option in _SCOPE if getattr(args, option) is not None
        )
        raise StartupError(
            f"no row has {named}; nothing was erased: check the spelling. --key finds the rows of the key's own chats; "
            "its feedback on other rows is erased with those"
        )
    open_console().print(f"{rows} rows erased; {_trained(versions, leased)}")
    return 0


def _trained(versions: set[int], leased: int) -> str:
    """Say which versions were trained on the rows."""
    known = f"they went into {_ranges(versions)}" if versions else "no version is known to contain them"
    if leased:
        return (
            f"{known}; a trainer has leased {leased} of them, or of replies that are preferred over them: repeat this "
            "command after it has saved its next state"
        )
    return known if versions else "no version was trained on them"


def _ranges(numbers: set[int]) -> str:
    """1, 2, 3, 7 → versions 1-3, 7"""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return "versions " + ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
