"""`flywheel status`: the ledger's figures about rows, versions and trainers."""

from __future__ import annotations

from argparse import Namespace
from contextlib import closing

from services.commands import add_config, open_console, read_config
from services.commands.traffic import in_words

HELP = "show rows by state, versions and trainers; GET /status also shows engines"
add_arguments = add_config


def run(args: Namespace) -> int:
    config = read_config(args)
    from shared.ledger.connect import Ledger
    from shared.ledger.queries import ledger_status

    with closing(Ledger.open(config.ledger_url, create=False)) as ledger:
        status = ledger.fetch(ledger_status)
    console = open_console()
    console.print("rows      " + "  ".join(f"{state} {count}" for state, count in status["rows"].items()))
    for reason, count in status["quarantined"].items():
        console.print(f"          {count} {reason}", highlight=False, markup=False, soft_wrap=True)
    pace = status["pace"]
    flow = f"recorded {pace['recorded_per_minute']:g} a minute  trained {pace['trained_per_minute']:g} a minute"
    oldest = "" if pace["oldest_ready_s"] is None else f"  oldest ready {pace['oldest_ready_s']:.0f} s"
    console.print(f"pace      {flow}{oldest}")
    versions = {name: "none" if value is None else value for name, value in status["versions"].items()}
    console.print(
        f"versions  newest {versions['newest']}  serving {versions['serving']}  published {versions['published']}  "
        f"reloads {versions['reloads']}  lag {status['lag_versions']}"
    )
    if shares := status["versions"]["shares"]:
        console.print(f"          {in_words(shares)}")
    for trainer in status["trainers"]:
        alive = "alive" if trainer["alive"] else "stopped"
        console.print(
            f"trainer   {trainer['name']}  {alive}  step {trainer['at_step']}  version {trainer['at_version']}  "
            f"heartbeat {trainer['heartbeat_age_s']:.0f} s ago"
        )
        if trainer["at_version"] != trainer["version"]:
            saved = f"its saved state has step {trainer['step']}, version {trainer['version']}"
            waiting = f"trained, waiting for a state: {trainer['rows_waiting_for_state']} rows"
            console.print(f"          {waiting}; {saved}", highlight=False, soft_wrap=True)
        if trainer["chosen"]:
            names = "  ".join(f"{name} {weight:g}" for name, weight in trainer["chosen"]["algorithms"].items())
            console.print(f"          algorithms by what is said: {names}", highlight=False, soft_wrap=True)
        if trainer["trouble"]:
            console.print(
                f"          cannot publish: {trainer['trouble']}", highlight=False, markup=False, soft_wrap=True
            )
        if trainer["tripped"]:
            reason = trainer["tripped"]["reason"]
            console.print(f"          breaker tripped: {reason}", highlight=False, markup=False, soft_wrap=True)
    return 0
