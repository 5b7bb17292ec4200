"""Model: a value for trainee, production model or judge, with a method for each agent framework."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import httpx

from flywheel import frameworks
from flywheel.addresses import origin_of, run_path
from flywheel.connections import AsyncHttpClient, Connections, HttpClient, proxy_for, tls_context
from flywheel.errors import ConfigError
from flywheel.transport import AsyncRunTransport, Chats, RunTransport, current_pin, current_run

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from flywheel.run import Run

_TIMEOUT = httpx.Timeout(600.0, connect=5.0)


@dataclass(frozen=True)
class Model:
    """A model's address, its name, and fields of its chats. An agent is `agent(request, model)` everywhere.

    params: fields of chats that the agent may override; overrides: fields that always win. Frameworks are imported
    only by their own methods.

    >>> production = Model.of("https://api.example.com/v1", "some-model", key="secret", temperature=0.2)
    >>> production.name, dict(production.params)
    ('some-model', {'temperature': 0.2})
    >>> production
    Model(base_url='https://api.example.com/v1', name='some-model', params={'temperature': 0.2})
    """

    base_url: str
    name: str
    key: str | None = field(default=None, repr=False)
    params: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict, repr=False)
    run: Run | None = field(default=None, repr=False, compare=False)
    connections: Connections | None = field(default=None, repr=False, compare=False)  # None: not a model of an explorer

    @classmethod
    def of(cls, base_url: str, name: str, *, key: str | None = None, **params: Any) -> Model:
        """Return a model of any provider with OpenAI's API. key: by default OPENAI_API_KEY of the environment.

        >>> Model.of("http://127.0.0.1:8101/v1", "judge").base_url
        'http://127.0.0.1:8101/v1'
        """
        return cls(base_url.rstrip("/"), name, key or os.environ.get("OPENAI_API_KEY"), params)

    @property
    def is_trainee(self) -> bool:
        """Whether this is the model that learns, not one version of it or another model."""
        return self.connections is not None and "@" not in self.name

    @property
    def version(self) -> int | None:
        """The explorer's version of this model; None for the trainee, and for models outside an explorer."""
        number = self.name.rpartition("@")[2] if self.connections is not None and "@" in self.name else ""
        return int(number) if number.isdecimal() else None

    def with_params(self, **params: Any) -> Model:
        """Return the same model with further fields for its chats.

        >>> dict(Model.of("http://h/v1", "m", temperature=1.0).with_params(temperature=0.0).params)
        {'temperature': 0.0}
        """
        return replace(self, params={**self.params, **params})

    def untrained(self) -> Model:
        """Return the same model, whose chats are served but never recorded (`"store": false`).

        >>> dict(Model.of("http://h/v1", "m").untrained().overrides)
        {'store': False}
        """
        return replace(self, overrides={**self.overrides, "store": False})

    @property
    def _is_plain(self) -> bool:
        return not (self.connections or self.params or self.overrides)

    def http_client(self) -> httpx.Client:
        """Return an httpx client whose chats belong to the run, with this model's parameters."""
        if self.connections:
            inner: httpx.BaseTransport = self.connections.sync()
        else:
            inner = httpx.HTTPTransport(verify=tls_context(), proxy=proxy_for(self.base_url))
        return HttpClient(transport=RunTransport(inner, self._chats()), timeout=_TIMEOUT)

    def async_http_client(self) -> httpx.AsyncClient:
        """Return an httpx client for asyncio."""
        if self.connections:
            inner = self.connections.asynchronous()
        elif proxy := proxy_for(self.base_url):
            inner = httpx.AsyncHTTPTransport(verify=tls_context(), proxy=proxy)
        else:
            inner = Connections().asynchronous(owned=True)
        return AsyncHttpClient(transport=AsyncRunTransport(inner, self._chats()), timeout=_TIMEOUT)

    def _chats(self) -> Chats:
        return Chats(self.run, self.overrides, self.params)

    def openai(self, **options: Any) -> OpenAI:
        """Return OpenAI's client. options: further arguments of openai.OpenAI.

        >>> Model.of("http://127.0.0.1:8101/v1", "agent", key="unused").openai().base_url
        URL('http://127.0.0.1:8101/v1/')
        """
        import openai

        http = openai.DefaultHttpxClient(verify=tls_context()) if self._is_plain else self.http_client()
        return openai.OpenAI(**self._openai_options(options, http))

    def async_openai(self, **options: Any) -> AsyncOpenAI:
        """Return OpenAI's client for asyncio.

        >>> Model.of("http://127.0.0.1:8101/v1", "agent", key="unused").async_openai(max_retries=0).max_retries
        0
        """
        import openai

        http = openai.DefaultAsyncHttpxClient(verify=tls_context()) if self._is_plain else self.async_http_client()
        return openai.AsyncOpenAI(**self._openai_options(options, http))

    def _openai_options(self, options: dict[str, Any], http: object) -> dict[str, Any]:
        own = {"base_url": self.base_url, "api_key": self.key or "unused"}
        return {**own, "http_client": http, **options}

    def agentscope(self, **options: Any) -> Any:
        """Return AgentScope's OpenAIChatModel, for the installed 1.x or 2.x."""
        return frameworks.agentscope(self, options)

    def langchain(self, **options: Any) -> Any:
        """Return LangChain's ChatOpenAI, also for LangGraph."""
        return frameworks.langchain(self, options)

    def openai_agents(self, **options: Any) -> Any:
        """Return OpenAI Agents SDK's OpenAIChatCompletionsModel."""
        return frameworks.openai_agents(self, options)

    def pydantic_ai(self, **options: Any) -> Any:
        """Return pydantic-ai's OpenAIChatModel."""
        return frameworks.pydantic_ai(self, options)

    def smolagents(self, **options: Any) -> Any:
        """Return smolagents' OpenAIModel."""
        return frameworks.smolagents(self, options)

    def litellm(self, *, sync: bool = False) -> dict[str, Any]:
        """Return arguments of litellm.acompletion; with sync, of litellm.completion.

        >>> Model.of("http://h/v1", "agent", key="unused").litellm(sync=True)["model"]
        'openai/agent'
        """
        client = self.openai() if sync else self.async_openai()
        return {"model": f"openai/{self.name}", "api_key": self.key or "unused", "client": client}

    def env(self) -> dict[str, str]:
        """Return the environment of a program that reads only OpenAI's variables; the URL's path names the run.

        Raises ConfigError for a model with parameters, which the path cannot contain, and in a shadow run, because the
        program's tools cannot be guarded.

        >>> Model.of("http://127.0.0.1:8101/v1", "agent", key="k").env()["OPENAI_BASE_URL"]
        'http://127.0.0.1:8101/v1'
        """
        if self.params or self.overrides:
            fields = ", ".join([*self.params, *self.overrides])
            raise ConfigError(f"env() cannot carry {fields}: let the program set them in its chats")
        if self.run is not None and self.run.guard is not None:
            raise ConfigError(
                "env() in a shadow run: the tools of a program cannot be watched; give it no writing tools "
                "and start it with run.path_url, if you know that it has none"
            )
        base_url = self.base_url if self.run is None else self.run.path_url
        return {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": self.key or "unused", "OPENAI_MODEL": self.name}


def path_url(url: str, task_id: str, run_id: str) -> str:
    """Return the base URL that names a run.

    >>> path_url("http://127.0.0.1:8010", "a/b", "0")
    'http://127.0.0.1:8010/run/a%2Fb/0/v1'
    """
    return f"{url}{run_path(task_id, run_id)}/v1"


@asynccontextmanager
async def outside_runs(model: Model, *, judges: bool = False, **options: Any) -> AsyncIterator[AsyncOpenAI]:
    """Open OpenAI's client for the chats of a judge or a simulated user, which belong to no run.

    If the model is one of the explorer's, they are not recorded either: a model of a client, or one by the address of
    the run or evaluation around. judges: raise ConfigError for the trainee. options: arguments of openai.AsyncOpenAI.
    """
    origin, around = origin_of(model.base_url), (current_run.get(), current_pin.get())
    trainees = [one.trainee for one in around if one is not None and one.origin == origin]
    is_explorers = model.connections is not None or bool(trainees)
    if judges and (model.name in trainees or (model.connections is not None and "@" not in model.name)):
        raise ConfigError("the trainee would judge itself: give another model, or a version of it: client.model(0)")
    run, pin = current_run.set(None), current_pin.set(None)
    try:
        apart = replace(model.untrained() if is_explorers else model, run=None)
        async with apart.async_openai(**options) as client:
            yield client
    finally:
        current_run.reset(run)
        current_pin.reset(pin)
