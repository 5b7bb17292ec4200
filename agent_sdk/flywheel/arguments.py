"""Reads the arguments of a tool, by name, from a call of the function in which a framework or a program stores it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

Reader = Callable[[inspect.Signature, tuple[Any, ...], dict[str, Any]], dict[str, Any]]


def arguments_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function: without the object of a method, and with those of its `**kwargs`.

    >>> class Office:
    ...     def refund(self, order, **more): ...
    >>> arguments_of(inspect.signature(Office.refund), (Office(), "A1"), {"note": "late"})
    {'order': 'A1', 'note': 'late'}
    """
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # the function will raise it, too
        return {**{str(place): value for place, value in enumerate(args)}, **kwargs}
    found: dict[str, Any] = {}
    for place, (name, parameter) in enumerate(signature.parameters.items()):
        if name not in given or (place == 0 and name == "self"):
            continue
        found |= given[name] if parameter.kind is parameter.VAR_KEYWORD else {name: given[name]}
    return found


def without_self(signature: inspect.Signature) -> inspect.Signature:
    """Return the signature of a tool's function: smolagents' `forward` declares a `self` that is not passed.

    >>> def forward(self, order, note=""): ...
    >>> arguments_of(without_self(inspect.signature(forward)), ("A1", "late"), {})
    {'order': 'A1', 'note': 'late'}
    """
    parameters = list(signature.parameters.values())
    begins_with_self = bool(parameters) and parameters[0].name == "self"
    return signature.replace(parameters=parameters[1:]) if begins_with_self else signature


def arguments_without_context(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a function whose first one is the framework's context, as pydantic-ai passes it.

    >>> def refund(ctx, order): ...
    >>> arguments_without_context(inspect.signature(refund), (None,), {"order": "A1"})
    {'order': 'A1'}
    """
    parameters = list(signature.parameters.values())[1:]
    return arguments_of(signature.replace(parameters=parameters), args[1:], kwargs)


def arguments_in_json(_: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments in the model's text, which the OpenAI Agents SDK passes last, after its context.

    >>> def on_invoke_tool(ctx, input): ...
    >>> arguments_in_json(inspect.signature(on_invoke_tool), (None, '{"order": "A1"}'), {})
    {'order': 'A1'}
    """
    text = (None, *args, *kwargs.values())[-1]
    try:
        found = json.loads(text or "{}")
    except (TypeError, ValueError):
        found = None
    return found if isinstance(found, dict) else {"input": text}
