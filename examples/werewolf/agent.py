"""The players: each is an AgentScope 2 Agent, written as in its documentation, and the loop that plays a game."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import flywheel
from agentscope.agent import Agent, InjectionConfig
from agentscope.message import UserMsg

from examples.werewolf.world import Game, role, villager

RULES = (
    "You play Werewolf. Two of six players are wolves and kill a player each night. By day everybody accuses one "
    "player, then everybody votes, and the player with the most votes is hanged. The villagers win when both wolves "
    "are dead, the wolves when they are as many as the villagers. Answer each question with a living player's name."
)


def player(game: Game, name: str, model: flywheel.Model, rules: str = RULES) -> Agent:
    """Return a player of a game. Its prompts contain no time, so each chat continues the one before."""
    return Agent(
        name=name,
        system_prompt=f"{rules} {role(game, name)}",
        model=model.agentscope(),
        injection_config=InjectionConfig(inject_runtime_state=False),
    )


async def play(seed: int, models: Mapping[str, flywheel.Model], rules: str = RULES) -> Game:
    """Play the game of this seed. models: by agent player; all other players are scripted villagers."""
    game = Game(seed)
    agents = {name: player(game, name, model, rules) for name, model in models.items()}

    async def answer(name: str) -> str:
        if name not in agents:
            return villager(game, name)
        reply = await agents[name].reply(UserMsg("moderator", game.tell(name)))
        return reply.get_text_content() or ""

    while names := game.turn():
        answers = await asyncio.gather(*(answer(name) for name in names))
        game.take(dict(zip(names, answers, strict=True)))
    return game
