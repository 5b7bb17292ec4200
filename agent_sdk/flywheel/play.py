"""play: lets a model act in a text environment, turn by turn, with the whole history in each chat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flywheel.model import Model


class TextEnvironment(Protocol):
    """Gymnasium's interface, with text as observations and actions.

    >>> class Echo:
    ...     def reset(self, *, seed=None):
    ...         return "say something", {}
    ...
    ...     def step(self, action):
    ...         return f"you said {action}", 1.0, True, False, {}
    >>> environment: TextEnvironment = Echo()
    """

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode. Returns the first observation, and further information."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Return the next observation, the reward, whether the episode has ended, whether it was truncated, and
        further information.

        action: the model's whole answer; the environment decides whether it is a valid action.
        """


@dataclass(frozen=True)
class Played:
    """One episode.

    >>> Played(reward=1.0, turns=3, terminated=True).reward
    1.0
    """

    reward: float  # sum over all turns
    turns: int
    terminated: bool  # False: the environment or max_turns truncated the episode
    info: Mapping[str, Any] = field(default_factory=dict)  # from the last turn
    messages: list[dict[str, str]] = field(default_factory=list, repr=False)


async def play(
    environment: TextEnvironment,
    model: Model,
    *,
    system: str | None = None,
    seed: int | None = None,
    max_turns: int = 30,
    **params: Any,
) -> Played:
    """Let a model act in an environment until the episode ends, or for max_turns. params: fields of the chats.

    >>> import inspect
    >>> inspect.iscoroutinefunction(play)
    True
    """
    observation, info = environment.reset(seed=seed)
    messages = [{"role": "system", "content": system}] if system else []
    reward, turns, terminated, truncated = 0.0, 0, False, False
    async with model.async_openai() as client:
        while turns < max_turns and not (terminated or truncated):
            messages.append({"role": "user", "content": observation})
            reply = await client.chat.completions.create(model=model.name, messages=messages, **params)  # type: ignore[arg-type]
            said = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})
            observation, earned, terminated, truncated, info = environment.step(said)
            reward += float(earned)
            turns += 1
    return Played(reward, turns, bool(terminated), info, messages)
