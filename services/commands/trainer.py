"""`flywheel trainer`: the service that trains."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace

from services.commands import add_config, read_config

HELP = "start the trainer, the service that learns"


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--resume", action="store_true", help="release the breaker and continue from the last saved state"
    )


def run(args: Namespace) -> int:
    """Run the trainer, on `trainer.ranks` ranks unless this process is one of them."""
    config = read_config(args)
    from services.ranks import end_with_torchrun, is_a_rank, require_ranks, run_ranks

    if args.resume and os.environ.get("RANK", "0") == "0":
        from services.resume import resume_trainer

        if resume_trainer(config):
            return 0
    if is_a_rank():
        require_ranks(config.trainer.ranks)
    elif config.trainer.ranks > 1:
        return run_ranks(config.trainer.ranks, ["trainer", "-c", args.config], config.log_level)
    from services.trainer import run_trainer

    end_with_torchrun()
    return run_trainer(config)
