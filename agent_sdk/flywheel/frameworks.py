"""Adapters: a model as an object of each agent framework, which is imported on use."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from flywheel.errors import ConfigError

if TYPE_CHECKING:
    from flywheel.model import Model


def agentscope(model: Model, options: dict[str, Any]) -> Any:
    """agentscope.model.OpenAIChatModel: 1.x takes `model_name`, 2.x a credential."""
    from agentscope.model import OpenAIChatModel

    client: dict[str, Any] = {"base_url": model.base_url, "http_client": model.async_http_client()}
    if "credential" not in inspect.signature(OpenAIChatModel.__init__).parameters:
        return OpenAIChatModel(
            model_name=model.name, api_key=model.key or "unused", client_kwargs=client, **{"stream": False, **options}
        )
    from agentscope.credential import OpenAICredential

    credential = OpenAICredential(api_key=model.key or "unused", base_url=model.base_url)
    del client["base_url"]
    return OpenAIChatModel(credential, model=model.name, client_kwargs=client, **options)


def langchain(model: Model, options: dict[str, Any]) -> Any:
    """langchain_openai.ChatOpenAI, for sync and async calls."""
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=model.name,
        base_url=model.base_url,
        api_key=model.key or "unused",
        http_client=model.http_client(),
        http_async_client=model.async_http_client(),
        **options,
    )


def openai_agents(model: Model, options: dict[str, Any]) -> Any:
    """agents.OpenAIChatCompletionsModel."""
    from agents import OpenAIChatCompletionsModel

    return OpenAIChatCompletionsModel(model=model.name, openai_client=model.async_openai(), **options)


def pydantic_ai(model: Model, options: dict[str, Any]) -> Any:
    """pydantic_ai.models.openai.OpenAIChatModel."""
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIChatModel(model.name, provider=OpenAIProvider(openai_client=model.async_openai()), **options)


def smolagents(model: Model, options: dict[str, Any]) -> Any:
    """smolagents.OpenAIModel."""
    from smolagents import OpenAIModel

    if "client_kwargs" in options:
        raise ConfigError("client_kwargs belong to the model here: give other arguments of OpenAIModel")
    return OpenAIModel(
        model.name,
        api_base=model.base_url,
        api_key=model.key or "unused",
        client_kwargs={"http_client": model.http_client()},
        **options,
    )
