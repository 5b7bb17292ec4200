"""python -m examples.werewolf: two wolves learn to win against four villagers."""

from __future__ import annotations

import itertools
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace

import flywheel
from flywheel.run import Run

from examples.run import Example, parser, run
from examples.werewolf import tiny
from examples.werewolf.agent import RULES, play
from examples.werewolf.reward import outcome, reward
from examples.werewolf.world import Game

ABOUT = "Wolves learn to win against four villagers: win 1.0, survive 0.5, blame 0.2, exposed -0.5."
TURN = 100  # games of self-play in which one side is trained


def example(args: Namespace) -> Example:
    """Return the example. Each player that learns has a run of its own."""
    games, rules = itertools.count(), RULES if args.url else tiny.RULES

    async def workflow(task: Mapping[str, int], model: flywheel.Model, run: Run) -> tuple[Game, dict[str, Run]]:
        game = Game(task["seed"])
        villagers_learn = args.self_play and not run.is_trial and next(games) // TURN % 2 == 1
        learners = [name for name in game.seats if (name not in game.wolves) == villagers_learn]
        runs = {name: run.child(name) for name in learners}
        models = {name: one.model for name, one in runs.items()}
        if (args.self_play and not run.is_trial) or args.villagers:
            named = replace(model, name=args.villagers or model.name, run=None).untrained()
            models |= {name: named for name in game.seats if name not in models}
        return await play(task["seed"], models, rules), runs

    def judge(task: Mapping[str, int], reply: tuple[Game, dict[str, Run]]) -> flywheel.Reward:
        game, runs = reply
        for name, one in runs.items():
            if one.chats:  # a player killed in the first night has no chats
                one.take(reward(game, name))
        return outcome(game)

    tasks, held_out = ([{"seed": seed} for seed in seeds] for seeds in (tiny.TRAINING, tiny.HELD_OUT))
    return Example(
        "werewolf", ABOUT, workflow, judge, tasks, held_out, tiny.recipe, tiny.ENGINE, tiny.TRAINER,
        learn=tiny.LEARN, parts=lambda reply: [one for one in reply[1].values() if one.chats],
    )  # fmt: skip


if __name__ == "__main__":
    options = parser("werewolf", ABOUT)
    options.add_argument("--villagers", metavar="MODEL", help="who plays the villagers, such as agent@0; else a script")
    options.add_argument("--self-play", action="store_true", help="train wolves and villagers in turn, 100 games each")
    arguments = options.parse_args()
    if arguments.villagers and (arguments.self_play or ("@" in arguments.villagers and not arguments.url)):
        options.error("--villagers: not with --self-play; a version needs --url of a server with `model.kind: lora`")
    sys.exit(run(example(arguments), arguments))
