"""`flywheel rewards`: applies the `reward` section and the algorithm to rows that no trainer has claimed yet."""

from __future__ import annotations

from argparse import Namespace
from contextlib import closing

from services.commands import add_config, open_console, read_config

HELP = "recompute the rewards of rows that are not trained yet, after a change of rule or algorithm"
add_arguments = add_config


def run(args: Namespace) -> int:
    config = read_config(args)
    from shared.ledger import transitions
    from shared.ledger.connect import Ledger

    learned = config.trainer.learns_from
    changed = 0
    last_id: int | None = 0
    with closing(Ledger.open(config.ledger_url, create=False)) as ledger:
        while last_id is not None:
            with ledger.write() as connection:
                count, last_id = transitions.recompute_rewards(connection, config.reward, learned, last_id)
            changed += count
    open_console().print(f"{changed} rewards changed")
    return 0
