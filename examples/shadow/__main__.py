"""`python -m examples.shadow`: a support desk in production, and a trainee that learns from shadow traffic."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from argparse import Namespace
from typing import Any

import flywheel

from examples.run import in_one_line, of_version_in_service, parser
from examples.serving import loopback_without_proxy, make_model, make_root, running, write_config
from examples.shadow import tiny
from examples.shadow.picture import draw
from examples.shadow.play import evaluate, go_live
from examples.tiny_model import folder_of

ABOUT = "shadow: production is served by a strong model; a fifth of its calls is replayed by the model that learns"
HELD_OUT = 100  # tickets


def measured(found: flywheel.Evaluation) -> dict[str, float]:
    return {"reward": found.mean, "standard_error": found.standard_error, **found.metrics}


def main(args: Namespace) -> dict[str, Any]:
    make_root(args.root)
    with contextlib.ExitStack() as stack:
        url, agent_options = args.url, dict[str, Any]()
        if url is None:
            model = make_model(tiny.recipe, folder_of("shadow"), args.root)
            url, file = write_config(args.root, model, tiny.ENGINE, {**tiny.TRAINER, "seed": args.seed})
            agent_options = tiny.AGENT
            stack.enter_context(running(url, file))
        else:
            stack.enter_context(loopback_without_proxy())  # the office and the strong model are on loopback
        client = flywheel.Client(url, model=args.model)
        tickets = args.held_out or HELD_OUT
        before = of_version_in_service(client, lambda model: evaluate(url, model, agent_options, tickets))
        live = {"seconds": 60 * args.minutes, "seed": args.seed, "shuffled": args.shuffled}
        books, figures = asyncio.run(go_live(url, agent_options=agent_options, model=args.model, **live))
        after = of_version_in_service(client, lambda model: evaluate(url, model, agent_options, tickets))
    found = {"example": "shadow", "seed": args.seed, "shuffled": args.shuffled}
    for name, one in (("before", before), ("after", after)):
        found[name] = {"version": one.version, "n": one.n, "failed": one.failed, **measured(one)}
        print(f"{name}: reward {one.mean:.3f} ± {one.standard_error:.3f} on {one.n} tickets", file=sys.stderr)
    found |= figures
    draw(args.root / "report.html", books.production, books.shadow, found)
    return found


if __name__ == "__main__":
    options = parser("shadow", ABOUT)
    arguments = options.parse_args()
    if arguments.config:
        options.error("--config: shadow does not use flywheel.learn, whose options the file has")
    sys.exit(in_one_line("shadow", lambda: main(arguments)))
