"""`flywheel rollback`: goes back to an earlier version, with engines and trainers."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import closing

from services.commands import add_config, open_console, read_config
from services.commands.traffic import in_words

HELP = "go back to an earlier version: reject all later ones, and train on from it"


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "version", nargs="?", type=int, metavar="N", help="default: the last that served before the one in service"
    )
    parser.add_argument("--again", action="store_true", help="train again on what rejected versions were trained on")


def run(args: Namespace) -> int:
    """Roll back, and print what changed. Raises CannotRollBack."""
    config = read_config(args)
    from shared.ledger import transitions
    from shared.ledger.connect import Ledger

    with closing(Ledger.open(config.ledger_url, create=False)) as ledger, ledger.write() as connection:
        to, again = args.version, args.again
        done = transitions.roll_back(connection, to, again=again, by="operator", rule=config.reward)
    console = open_console(markup=False)
    rejected = ", ".join(map(str, done.rejected)) or "none"
    follows = "engines load it within seconds"
    if done.to not in done.traffic:
        answering = in_words(done.traffic) if done.traffic else "no version"
        follows = f"chats stay with {answering}, as an operator decided; `flywheel traffic newest` ends this"
    console.print(f"rolled back to version {done.to}; rejected: {rejected}; {follows}")
    for name, has_state in done.trainers.items():
        start = "saved state" if has_state else "weights, with a new optimizer: no saved state of it is kept"
        if name in done.held:
            until = f"its breaker holds it ({done.held[name]}); after `flywheel trainer --resume`, it"
            console.print(f"trainer {name}: {until} starts again from its {start}")
        else:
            console.print(f"trainer {name} starts again from its {start}")
    if args.again:
        console.print(f"rows that are trained on again: {done.rows}")
    return 0
