"""`flywheel up`: engines, explorer and trainer as separate processes on this machine, under one supervisor."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import closing
from pathlib import Path

from services.commands import add_config, read_config
from shared.errors import ConfigError

PARTS = ("engines", "explorer", "trainer")
HELP = "start and supervise engines, explorer and trainer on this machine"


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--without", action="append", default=[], choices=PARTS, help="do not start this part; may be repeated"
    )


def run(args: Namespace) -> int:
    """Run everything except the parts left out until SIGINT or SIGTERM; a second one kills.

    Raises ConfigError, StartupError.
    """
    config = read_config(args)
    if len(set(args.without)) == len(PARTS):
        raise ConfigError("--without leaves all parts out, and nothing is left to run; name one less")
    from services.supervisor import STOP_TIMEOUT_S, Child, Supervisor, listen_for_two
    from shared.belonging import require_belonging
    from shared.config import is_loopback
    from shared.ledger.connect import Ledger
    from shared.log import configure_logging
    from shared.ports import require_free_port
    from shared.stop_request import StopRequest

    configure_logging("up", config.log_level)
    stop, kill = StopRequest(), StopRequest()
    listen_for_two(stop, kill)
    engines = [e for e in config.explorer.engines if is_loopback(e.host) and "engines" not in args.without]
    for engine in engines:
        require_free_port(engine.host, engine.port, f"the url of explorer.engines {engine.name!r}")
    if "explorer" not in args.without:
        require_free_port(config.explorer.host, config.explorer.port, "explorer.host or explorer.port")
    if not (Path(config.model.path) / "config.json").exists():
        raise ConfigError(
            f"model.path={config.model.path!r} is no model folder (no config.json in it); correct model.path"
        )
    with closing(Ledger.open(config.ledger_url)) as ledger:  # reports an error once, and not from every process
        require_belonging(config.root, ledger)
    children = [Child(f"engine-{e.name}", ["engine", "-c", args.config, "--name", e.name]) for e in engines]
    if not engines and {"explorer", "trainer"} <= set(args.without):
        raise ConfigError("no engine is on this machine, and --without leaves the rest out: nothing is left to run")
    saving_s = STOP_TIMEOUT_S + config.trainer.rank_timeout_s  # at a regular end, the trainer saves a state
    limits = {"explorer": STOP_TIMEOUT_S, "trainer": saving_s}
    wanted = [name for name in limits if name not in args.without]
    parts = [Child(name, [name, "-c", args.config], limits[name]) for name in wanted]
    return Supervisor([*children, *parts], stop, kill).run()
