"""`flywheel traffic`: shows or sets the shares that versions get of the chats that name no version."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from contextlib import closing
from types import MappingProxyType
from typing import TYPE_CHECKING

from services.commands import add_config, open_console, read_config
from shared.errors import ConfigError

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from shared.config import Config
    from shared.ledger.queries import Rewards

HELP = "show how chats are divided among versions, or divide them: 12=0.9 13=0.1, or newest"
_NEWEST = "newest"


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "weights",
        nargs="*",
        type=_weight,
        metavar="N=WEIGHT",
        help="versions with their weights; or `newest`: the newest version that may serve gets all chats",
    )


def _weight(text: str) -> tuple[int, float] | None:
    """Return a version and its weight; None for `newest`. Raises ArgumentTypeError."""
    if text == _NEWEST:
        return None
    version, _, weight = text.partition("=")
    try:
        return int(version), float(weight)
    except ValueError:
        raise ArgumentTypeError(f"{text!a} is not a version and its weight, such as 12=0.9, or {_NEWEST}") from None


def run(args: Namespace) -> int:
    """Show or set the shares. Raises ConfigError for arguments that contradict one another, CannotServe."""
    config = read_config(args)
    if not args.weights:
        _show(config)
        return 0
    given = [pair for pair in args.weights if pair is not None]
    weights = dict(given)
    if len(weights) != len(args.weights) and (given or len(args.weights) > 1):
        raise ConfigError(f"traffic: name each version once, or only {_NEWEST}")
    share(config, weights)
    return 0


def share(config: Config, weights: Mapping[int, float]) -> None:
    """Set the shares, and print them. Raises CannotServe."""
    from shared.ledger import transitions
    from shared.ledger.connect import Ledger

    at_most, needed = config.versions_served, config.needed_to_serve_more
    with closing(Ledger.open(config.ledger_url, create=False)) as ledger, ledger.write() as connection:
        shares = transitions.share_traffic(connection, weights, at_most=at_most, by="operator", needed=needed)
    open_console(markup=False).print(f"chats: {in_words(shares)}; engines load what they lack within seconds")


def in_words(shares: Mapping[int, float], lost: Mapping[int, str] = MappingProxyType({})) -> str:
    """Return the shares for an operator to read. lost: states of versions that answer nothing."""
    remarks = {version: f" ({state}: it answers none)" for version, state in lost.items()}
    parts = (f"version {version} {100 * share:.4g}%{remarks.get(version, '')}" for version, share in shares.items())
    return ", ".join(parts) or "all to the newest version that may serve"


def shares_in_words(connection: Connection) -> str:
    """Return the shares that an operator gave, for an operator to read."""
    from shared.ledger.queries import find_versions, shares_of_traffic

    shares = shares_of_traffic(connection)
    rows = find_versions(connection, shares.keys())
    return in_words(shares, {version: row.state for version, row in rows.items() if not row.may_be_pinned})


def _show(config: Config) -> None:
    """Print the shares, and the rewards of each version that has one."""
    from shared.ledger.connect import Ledger
    from shared.ledger.queries import rewards_by_version, shares_of_traffic

    with closing(Ledger.open(config.ledger_url, create=False)) as ledger:
        shares, rewards = ledger.fetch(shares_of_traffic), ledger.fetch(rewards_by_version)
        words = ledger.fetch(shares_in_words)
    console = open_console(markup=False)
    console.print(f"chats: {words}")
    rewarded = {row.version: row for row in rewards}
    for version in shares:
        console.print(f"version {version}  rewards {_mean(rewarded.get(version))}")


def _mean(rewards: Rewards | None) -> str:
    if rewards is None:
        return "none yet"
    error = "" if rewards.standard_error is None else f" ± {rewards.standard_error:.2g}"
    return f"{rewards.mean:.4g}{error}  rows {rewards.count}"
