"""play: lets a model act in a text environment, turn by turn, with the whole history in each chat."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flywheel.model import Model
from flywheel.threads import DaemonThreads
from flywheel.workflow import without_stop

# In the errors of OpenAI's API and vLLM (vllm/renderers/params.py), and of vLLM for a prompt that just fits
# (vllm/v1/engine/input_processor.py; vllm/sampling_params.py, which gets the rest of the context as max_tokens).
_CONTEXT_IS_FULL = ("maximum context length", "maximum model length", "max_tokens must be at least 1, got 0")


class TextEnvironment(Protocol):
    """Gymnasium's interface, or Gym's older one, with text as observations and actions.

    >>> class Echo:
    ...     def reset(self, *, seed=None):
    ...         return "say something", {}
    ...
    ...     def step(self, action):
    ...         return f"you said {action}", 1.0, True, False, {}
    >>> environment: TextEnvironment = Echo()

    Both methods are called in the event loop of all runs, unless `play` is given `in_thread=True`: until one returns,
    no other run proceeds, and neither time limits nor Ctrl-C take effect.
    """

    def reset(self) -> tuple[str, Any] | str:
        """Start an episode. Returns the first observation, and further information, which the older interface
        omits.

        It is called with `seed=` if `play` is given a seed.
        """

    def step(self, action: str) -> tuple[str, float, bool, bool, Any] | tuple[str, float, bool, Any]:
        """Return the next observation, the reward, whether the episode has ended, whether it was truncated, and
        further information, a dictionary.

        action: the model's whole answer; the environment decides whether it is a valid action. The older interface
        returns four values, and names a truncation in the last one: `{"TimeLimit.truncated": True}`.
        """


@dataclass(frozen=True)
class Played:
    """One episode.

    >>> Played(reward=1.0, turns=3, terminated=True).reward
    1.0
    """

    reward: float  # sum over all turns
    turns: int
    terminated: bool  # False: the environment, max_turns or the model's context truncated the episode
    info: Mapping[str, Any] = field(default_factory=dict)  # from the last turn
    messages: list[dict[str, str]] = field(default_factory=list, repr=False)


def is_context_full(error: Exception) -> bool:
    """Whether a chat was refused because its messages fill the model's context. error: from OpenAI's client.

    >>> import httpx, openai
    >>> response = httpx.Response(400, request=httpx.Request("POST", "http://127.0.0.1"))
    >>> is_context_full(openai.BadRequestError("The maximum context length is 2048.", response=response, body=None))
    True
    """
    import openai

    return isinstance(error, openai.BadRequestError) and any(words in error.message for words in _CONTEXT_IS_FULL)


async def play(
    environment: TextEnvironment,
    model: Model,
    *,
    system: str | None = None,
    seed: int | None = None,
    max_turns: int = 30,
    in_thread: bool = False,
    **params: Any,
) -> Played:
    """Let a model act in an environment.

    It acts until the episode ends, for max_turns, or until the history fills the model's context.

    seed: passed to `reset`. in_thread: whether the environment is called in a thread of this episode, with the caller's
    context, so that one that is slow or hangs delays no other run; episodes must share nothing then that is not
    thread-safe. params: fields of the chats. Raises TypeError if `step` returns anything else than four or five values;
    openai.OpenAIError if a chat fails, also if the context does not hold the first observation.

    >>> import inspect
    >>> inspect.iscoroutinefunction(play)
    True
    """
    import openai

    messages = [{"role": "system", "content": system}] if system else []
    reward, turns, terminated, truncated = 0.0, 0, False, False
    async with contextlib.AsyncExitStack() as stack:
        call = stack.enter_context(_calls(in_thread))
        observation, info = await call(_reset, environment, seed)
        client = await stack.enter_async_context(model.async_openai())
        while turns < max_turns and not (terminated or truncated):
            messages.append({"role": "user", "content": observation})
            try:
                reply = await client.chat.completions.create(model=model.name, messages=messages, **params)  # type: ignore[arg-type]
            except openai.BadRequestError as error:
                if not turns or not is_context_full(error):
                    raise
                break
            said = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})
            observation, earned, terminated, truncated, info = await call(_step, environment, said)
            reward += earned
            turns += 1
    return Played(reward, turns, terminated, info, messages)


@contextlib.contextmanager
def _calls(in_thread: bool) -> Iterator[Callable[..., Awaitable[Any]]]:
    """Yield what calls a function for one episode: here, or in one thread, as some games and databases require."""
    if not in_thread:
        yield _call_here
        return
    context = contextvars.copy_context()  # what `reset` sets in it, `step` sees
    with DaemonThreads(1, "flywheel-play") as thread:

        async def call(function: Callable[..., Any], *values: Any) -> Any:
            job = functools.partial(function, *values)
            return await asyncio.get_running_loop().run_in_executor(thread, context.run, without_stop, job)

        yield call


async def _call_here(function: Callable[..., Any], *values: Any) -> Any:
    return function(*values)


def _reset(environment: Any, seed: int | None) -> tuple[str, Any]:
    began = environment.reset() if seed is None else environment.reset(seed=seed)
    return began if isinstance(began, tuple) else (began, {})


def _step(environment: TextEnvironment, action: str) -> tuple[str, float, bool, bool, Any]:
    match environment.step(action):
        case (observation, reward, terminated, truncated, info):
            return observation, float(reward), bool(terminated), bool(truncated), info
        case (observation, reward, done, info):
            truncated = bool(done and info and info.get("TimeLimit.truncated"))
            return observation, float(reward), bool(done) and not truncated, truncated, info or {}
        case other:
            raise TypeError(
                f"{type(environment).__name__}.step returned {other!a:.200}, not Gymnasium's 5 values: observation, "
                "reward, terminated, truncated, info (or the older 4: observation, reward, done, info)"
            )
