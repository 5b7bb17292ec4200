"""The reward of a player, with the AgentScope article's weights divided by ten, and the metrics of a game."""

from __future__ import annotations

from flywheel import Reward
from flywheel.rewards import Weighted

from examples.werewolf.world import ACCUSE, VOTE, Game

WOLF = Weighted({"team_win": 1.0, "survive": 0.5, "blame": 0.2, "exposed": -0.5})
VILLAGER = Weighted({"team_win": 1.0, "survive": 0.5, "found": 0.2})


def reward(game: Game, name: str) -> Reward:
    """Return the reward of a player in a finished game.

    A wolf's blame succeeds if a villager whom the wolf accused and voted for is hanged that day. A wolf is exposed if
    the wolf is hanged. A villager finds a wolf in the same way as a wolf blames. Each counts once a game.
    """
    is_wolf = name in game.wolves
    hanged = [death for death in game.deaths if death.phase == VOTE]
    against = {(one.day, one.phase, one.choice) for one in game.said if one.speaker == name}
    helped = [
        death.name
        for death in hanged
        if {(death.day, ACCUSE, death.name), (death.day, VOTE, death.name)} <= against
        and (death.name in game.wolves) != is_wolf
    ]
    parts = {
        "team_win": float(game.winner == ("wolves" if is_wolf else "villagers")),
        "survive": float(name in game.alive),
        "blame" if is_wolf else "found": float(bool(helped)),
    }
    if not is_wolf:
        return VILLAGER(parts)
    return WOLF({**parts, "exposed": float(any(death.name == name for death in hanged))})


def outcome(game: Game) -> Reward:
    """Return the wolves' mean reward and the metrics of an evaluation."""
    wolves = [reward(game, name) for name in sorted(game.wolves)]
    value = sum(one.value or 0.0 for one in wolves) / len(wolves)
    said = [one.choice for one in game.said if one.speaker in game.wolves]
    metrics = {
        "wins": float(game.winner == "wolves"),
        "days": float(game.day),
        "spoken": sum(choice is not None for choice in said) / len(said),
        **{name: sum(one.metrics[name] for one in wolves) / len(wolves) for name in ("survive", "blame", "exposed")},
    }
    return Reward(value, metrics)
