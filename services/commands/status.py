"""`flywheel status`: the ledger's figures about rows, versions, engines and trainers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from services.commands import add_config, open_console, read_config
from services.commands.traffic import shares_in_words

if TYPE_CHECKING:
    from rich.console import Console

    from shared.ledger.queries.status import EngineSeen

HELP = "show rows by state, versions, engines and trainers"
_SEE = "the explorer's log states the reason, and so does GET /status to admins"
_WHY = {  # by the state of an engine
    None: f"no explorer owns it; {_SEE}",
    "unavailable": f"it does not answer; {_SEE}",
    "checking": f"it answers, but no version is proven on it; {_SEE}",
    "degraded": f"it serves an older version than it should; {_SEE}",
    "reloading": "it loads a version, and gets no chats meanwhile",
}
add_arguments = add_config


def run(args: Namespace) -> int:
    config = read_config(args)
    from shared.ledger.connect import Ledger
    from shared.ledger.queries import ledger_status
    from shared.ledger.queries.status import engines_in_use

    with closing(Ledger.open(config.ledger_url, create=False)) as ledger:
        status, engines = ledger.fetch(ledger_status), ledger.fetch(engines_in_use)
        shares = ledger.fetch(shares_in_words)
    console = open_console()
    console.print("rows      " + "  ".join(f"{state} {count}" for state, count in status["rows"].items()))
    for reason, count in status["quarantined"].items():
        _detail(console, f"{count} {reason}")
    pace = status["pace"]
    flow = f"recorded {pace['recorded_per_minute']:g} a minute  trained {pace['trained_per_minute']:g} a minute"
    oldest = "" if pace["oldest_ready_s"] is None else f"  oldest ready row is {pace['oldest_ready_s']:.0f} s old"
    console.print(f"pace      {flow}{oldest}")
    versions = {name: "none" if value is None else value for name, value in status["versions"].items()}
    console.print(
        f"versions  newest {versions['newest']}  serving {versions['serving']}  published {versions['published']}  "
        f"reloads {versions['reloads']}  lag {status['lag_versions']}"
    )
    if status["versions"]["shares"]:
        _detail(console, f"chats: {shares}")
    _print_engines(console, engines, {engine.plain_url: engine.name for engine in config.explorer.engines})
    for trainer in status["trainers"]:
        _print_trainer(console, trainer)
    return 0


def _print_engines(console: Console, engines: Sequence[EngineSeen], names: Mapping[str, str]) -> None:
    """names: of the configured engines, by `plain_url`, as in the ledger."""
    if not engines:
        console.print("engine    none in service: no explorer is alive")
    for engine in engines:
        name = names.get(engine.key.rpartition(" ")[2])
        about = f"{engine.state or 'not in service'}  version {'none' if engine.version is None else engine.version}"
        line = f"{engine.key}  {about}" if name is None else f"{name}  {about}  {engine.key}"
        console.print(f"engine    {line}", highlight=False, markup=False, soft_wrap=True)
        if why := _WHY.get(engine.state):
            _detail(console, why)


def _print_trainer(console: Console, trainer: Mapping[str, Any]) -> None:
    alive = "alive" if trainer["alive"] else "stopped"
    console.print(
        f"trainer   {trainer['name']}  {alive}  step {trainer['at_step']}  version {trainer['at_version']}  "
        f"heartbeat {trainer['heartbeat_age_s']:.0f} s ago"
    )
    if trainer["at_version"] != trainer["version"]:
        saved = f"its saved state has step {trainer['step']}, version {trainer['version']}"
        _detail(console, f"trained, waiting for a state: {trainer['rows_waiting_for_state']} rows; {saved}")
    if trainer["chosen"]:
        names = "  ".join(f"{name} {weight:g}" for name, weight in trainer["chosen"]["algorithms"].items())
        _detail(console, f"algorithms by what is said: {names}")
    if trainer["trouble"]:
        _detail(console, f"cannot publish: {trainer['trouble']}")
    if trainer["tripped"]:
        _detail(console, f"breaker tripped: {trainer['tripped']['reason']}")


def _detail(console: Console, text: str) -> None:
    console.print(f"          {text}", highlight=False, markup=False, soft_wrap=True)
