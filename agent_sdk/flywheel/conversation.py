"""Conversations with a watched agent: production answers each turn, and the trainee replays turns or the whole.

The agent of a conversation is `agent(messages, model)`: it gets the history, with the new message last, and returns its
reply. A turn is replayed on the recorded history, so that nobody must guess the person's answer to another reply. The
whole is replayed with a user: the recorded messages one after the other, or a simulated person. Recorded messages may
not fit the trainee's replies; a simulated person may differ from the real one.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from flywheel.errors import ConfigError
from flywheel.model import Model, outside_runs
from flywheel.tools import Recording, recorded_in
from flywheel.workflow import Caller, Function

if TYPE_CHECKING:
    from flywheel.runner import TrainingRunner

Message = Mapping[str, Any]
User = Literal["recorded"] | Function


class Conversation:
    """One conversation of a person with production's agent, created by TrainingRunner.conversation.

    `say` returns the agent's result, awaited if the agent is async. Without a user, each turn is replayed on the
    recorded history. With a user, the whole is replayed as one run when `end` is called, and the reward function gets
    the messages of the replay as its reply.

    >>> import flywheel
    >>> runner = flywheel.TrainingRunner("http://127.0.0.1:8010", reward=lambda run, reply: 1.0)
    >>> chat = runner.conversation(lambda messages, model: f"reply {len(messages)}")
    >>> chat.say("hello"), chat.say("thanks")
    ('reply 1', 'reply 3')
    >>> [message["role"] for message in chat.messages]
    ['user', 'assistant', 'user', 'assistant']
    """

    def __init__(
        self, runner: TrainingRunner, agent: Function, production: Model | None, user: User | None, turns: int
    ) -> None:
        if not (user is None or user == "recorded" or callable(user)):
            raise ConfigError(f'user={user!r}: give "recorded", or a function of (messages, recorded)')
        if turns < 1:
            raise ConfigError(f"turns={turns}: give 1 or more")
        self.messages: list[Message] = []  # the recorded messages
        self._runner = runner
        self._agent = agent
        self._production = production
        self._user = user
        self._turns = turns
        self._serve = runner.watch(agent, production=production)
        self._recorded: Recording = []

    def say(self, text: str) -> Any:
        """Return the agent's reply to the person's message."""
        messages = [*self.messages, {"role": "user", "content": text}]
        if self._user is None:
            reply = self._serve(list(messages))  # the agent may append to its own
            return self._awaited(messages, reply) if inspect.isawaitable(reply) else self._store(messages, reply)
        with recorded_in(self._recorded):
            reply = self._agent(list(messages), self._production)
        return self._awaited(messages, reply) if inspect.isawaitable(reply) else self._store(messages, reply)

    async def _awaited(self, messages: list[Message], reply: Awaitable[Any]) -> Any:
        """Return the reply of an async agent. Without a user, the runner records the results of its tools."""
        with nullcontext() if self._user is None else recorded_in(self._recorded):
            return self._store(messages, await reply)

    def _store(self, messages: list[Message], reply: Any) -> Any:
        self.messages = [*messages, _as_message(reply)]
        return reply

    def end(self) -> None:
        """End the conversation: with a user, replay the whole of it if it is selected. Raises no error."""
        if self._user is None or not self.messages:
            return
        whole = partial(_Whole, self._runner.trainee_of(self._agent), self._user, self._turns)
        self._runner.offer(whole, self.messages, self.messages[-1].get("content"), self._recorded)
        self.messages, self._recorded = [], []


class _Whole:
    """The trainee in a whole conversation with a user, as a shadow run calls it."""

    def __init__(self, agent: Function, user: User, turns: int, pool: Executor) -> None:
        self._agent = Caller(agent, ("request", "model"), pool)
        self._user = None if user == "recorded" else Caller(user, ("messages", "recorded"), pool)
        self._turns = turns

    async def __call__(self, recorded: list[Message], model: Model) -> list[Message]:
        """Return the messages of the replay."""
        said = iter([message["content"] for message in recorded if message["role"] == "user"])
        messages: list[Message] = []
        for _ in range(self._turns):
            text = next(said, None) if self._user is None else await self._user(list(messages), recorded)
            if text is None:
                break
            messages.append({"role": "user", "content": text})
            messages.append(_as_message(await self._agent(list(messages), model)))
        return messages


def _as_message(reply: Any) -> Message:
    """Convert a reply for a history: a message unchanged, anything else as its text."""
    if isinstance(reply, Mapping) and "role" in reply:
        return reply
    return {"role": "assistant", "content": reply if isinstance(reply, str) else str(reply)}


class SimulatedUser:
    """Plays the person of a recorded conversation. Its own chats are never recorded.

    It produces the person's next message, and ends the conversation when the model answers END.

    >>> user = SimulatedUser(Model.of("https://api.example.com/v1", "strong", key="k"))
    >>> user.prompt([{"role": "user", "content": "Where is my parcel?"}]).splitlines()[-1]
    'user: Where is my parcel?'
    """

    def __init__(self, model: Model, *, timeout_s: float = 60.0) -> None:
        self._model = model
        self._timeout_s = timeout_s

    def prompt(self, recorded: Sequence[Message]) -> str:
        """Return the model's instructions about the person."""
        lines = "\n".join(f"{message['role']}: {message['content']}" for message in recorded)
        return (
            "You play the person called user in the conversation below, with the same wishes and manner, talking to "
            "another assistant. Write the person's next message and nothing else, or END when the person has what "
            f"they want or gives up.\n\n{lines}"
        )

    async def __call__(self, messages: Sequence[Message], recorded: Sequence[Message]) -> str | None:
        """Return the next message; the first is the recorded one. None ends the conversation."""
        if not messages:
            return str(recorded[0]["content"])
        swapped = {"user": "assistant", "assistant": "user"}
        turns = [{"role": swapped[message["role"]], "content": message["content"]} for message in messages]
        asked: list[Any] = [{"role": "system", "content": self.prompt(recorded)}, *turns]
        async with outside_runs(self._model, timeout=self._timeout_s) as client:
            reply = await client.chat.completions.create(model=self._model.name, messages=asked)
        text = (reply.choices[0].message.content or "").strip()
        return None if text in ("", "END") else text
