"""One line for a wrong setting: key, value, reason and remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_SECRETS = frozenset(("admin_token", "database_url", "key_env", "keys", "sha256", "url"))  # keys that may hold one
_SECRET = re.compile(  # of keys that there are not
    r"auth(?!ors?$)|credential|database|dsn|key|pass|pw|secret|sha256|token|url", re.IGNORECASE
)
_TYPE = re.compile(r"(function-before|literal|tuple)\[.*\]")  # in a path: one of several types, not a key

_SECTION = "must be a section; write its keys below it, or remove it"
_FORMS = {  # in place of pydantic's messages, which name Python's types
    "model_type": _SECTION,
    "dict_type": _SECTION,
    "tuple_type": "must be a list; write it in brackets, as in [a, b]",
    "too_short": "must have at least {min_length} entry; add one",
    "too_long": "must have at most {max_length} entries; remove the others",
}


def explain(error: ValidationError, whole: type[BaseModel], variables: Mapping[tuple[int | str, ...], str]) -> str:
    """Format one error as one line: an unknown key first, because it may be a misspelling of a missing one.

    whole: the validated model, whose keys are suggested. variables: of the environment, by the path of their setting.
    """
    first = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    first["loc"] = tuple(part for part in first["loc"] if not _TYPE.fullmatch(str(part)))
    prefixes = (first["loc"][:length] for length in range(len(first["loc"]), 0, -1))
    variable = next((variables[prefix] for prefix in prefixes if prefix in variables), None)
    return (f"environment variable {variable}: " if variable else "") + _line(first, whole)


def _line(first: ErrorDetails, whole: type[BaseModel]) -> str:
    key = ".".join(str(part) for part in first["loc"])
    key = key if key.isprintable() else repr(key)
    given = key + _shown(first["loc"], first["input"], is_known=first["type"] != "extra_forbidden")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return message
    if first["type"] == "extra_forbidden":
        return f"{given}: no such key; {_suggestion(whole, first['loc'])}"
    if first["type"] == "missing":
        return f"{key} is missing; add it to the configuration file"
    if first["type"] == "literal_error":
        return f"{given}: must be {first['ctx']['expected']}; choose one of them"
    if first["type"] in _FORMS:
        return f"{given}: {_FORMS[first['type']].format_map(first.get('ctx', {}))}"
    return f"{given}: {message[:1].lower()}{message[1:]}; correct it"


def _shown(path: tuple[int | str, ...], value: Any, *, is_known: bool) -> str:
    """Format the value after its key, unless it may be secret: keys, addresses with a password, whole sections.

    is_known: the configuration has such a key.
    """
    names = [part for part in path if isinstance(part, str)]
    if not _SECRETS.isdisjoint(names[-1:]) if is_known else any(map(_SECRET.search, names)):
        return ""
    if (isinstance(value, dict | list | tuple) and value) or (isinstance(value, str) and "://" in value):
        return ""
    return f"={value!r}"


def _suggestion(whole: type[BaseModel], path: tuple[int | str, ...]) -> str:
    """Suggest a key: the same one in the enclosing section, or else the most similar one."""
    *section, key = path
    if section and key in _known_keys(whole, tuple(section[:-1])):
        return f"did you mean {'.'.join([*map(str, section[:-1]), str(key)])!r}?"
    known = _known_keys(whole, tuple(section))
    near = difflib.get_close_matches(str(key), known, n=1)
    return f"did you mean {near[0]!r}?" if near else "known here: " + ", ".join(known)


def _known_keys(whole: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    section: Any = whole
    for part in path:
        if isinstance(part, str):
            annotation = section.model_fields[part].annotation
            section = annotation if hasattr(annotation, "model_fields") else annotation.__args__[0]
    return sorted(section.model_fields)
