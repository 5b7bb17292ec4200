"""guard: copies of a framework's tools that obey the policy of shadow runs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from flywheel.arguments import Reader, arguments_in_json, arguments_of, arguments_without_context, without_self
from flywheel.errors import ConfigError
from flywheel.tools import declare, guarded

# Attributes in which frameworks store a tool's function.
_CALLS = ("on_invoke_tool", "coroutine", "func", "_func", "function", "forward")


def guard(tools: Iterable[Any]) -> list[Any]:
    """Return copies of a framework's tools with the policy; their own flags tell which only read.

    The flags: AgentScope 2's `is_read_only`, MCP's `annotations.readOnlyHint`, and `metadata["read_only"]` of LangChain
    and pydantic-ai; a tool without any of them counts as writing. Raises ConfigError for a tool whose function cannot
    be found.

    >>> class Tool:
    ...     name, is_read_only, func = "lookup", True, staticmethod(lambda key: key)
    >>> guard([Tool()])[0].func("a")
    'a'
    """
    return [_guard_one(one) for one in tools]


def _guard_one(given: Any) -> Any:
    name = getattr(given, "name", None) or getattr(given, "__name__", None)
    if not isinstance(name, str):
        raise ConfigError(f"{given!r} has no name: wrap its function in @flywheel.tool(read_only=…)")
    read_only = _flag(given)
    declare(name, read_only=read_only)
    if inspect.isroutine(given):
        return guarded(given, name, read_only)
    called = {attribute: function for attribute in _CALLS if callable(function := getattr(given, attribute, None))}
    schema = getattr(given, "function_schema", None)
    if not called or (schema is not None and getattr(schema, "function", None) is not called.get("function")):
        raise ConfigError(
            f"tool {name}: its function cannot be found; wrap it in @flywheel.tool(read_only={read_only})"
        )
    copied = copy.copy(given)
    for attribute, function in called.items():
        signature = without_self(inspect.signature(function))
        wrapped = guarded(function, name, read_only, _reader(attribute, schema), signature)
        object.__setattr__(copied, attribute, wrapped)
    if schema is not None:  # pydantic-ai calls the function in it, and not its tool's own attribute
        copied.function_schema = copy.copy(schema)
        copied.function_schema.function = copied.function
    return copied


def _reader(attribute: str, schema: Any) -> Reader:
    """Return what reads the model's arguments of a call of the attribute."""
    if attribute == "on_invoke_tool":
        return arguments_in_json
    return arguments_without_context if getattr(schema, "takes_ctx", False) else arguments_of


def _flag(given: Any) -> bool:
    """Whether a tool's own flags declare that it only reads; False if they disagree or are missing."""
    hint = getattr(getattr(given, "annotations", None), "readOnlyHint", None)
    metadata = getattr(given, "metadata", None)
    noted = metadata.get("read_only", metadata.get("readOnlyHint")) if isinstance(metadata, Mapping) else None
    flags = [flag for flag in (getattr(given, "is_read_only", None), hint, noted) if isinstance(flag, bool)]
    return bool(flags) and all(flags)
