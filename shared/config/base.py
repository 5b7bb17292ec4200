"""Common parts of all sections: the base class, and the types of numbers and names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


def _refuse_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("no_number", "must be a number, and YAML reads yes, no, on and off as true and false")
    return value


def matches(pattern: str, form: str) -> AfterValidator:
    """Return a validator of texts that match the whole pattern. form: what the error says that a text must be."""
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise PydanticCustomError("form", "must be {form}", {"form": form})
        return value

    return AfterValidator(check)


NUMBER = BeforeValidator(_refuse_flag)

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), NUMBER]
Finite = Annotated[float, Field(allow_inf_nan=False), NUMBER]
Bounds = tuple[Finite, Finite]  # lower and upper
Share = Annotated[float, Field(ge=0, le=1), NUMBER]
Port = Annotated[int, Field(ge=1, le=65535, strict=True)]
Count = Annotated[int, Field(ge=1, le=10**12, strict=True)]  # fits into a database integer
Flag = Annotated[bool, Field(strict=True)]
Devices = Annotated[tuple[Annotated[int, Field(ge=0, strict=True)], ...], Field(min_length=1)]
_BEGIN = "letters, digits and {}, beginning with a letter or a digit"
Name = Annotated[str, Field(max_length=200), matches("[A-Za-z0-9][A-Za-z0-9._/-]*", _BEGIN.format(". _ - /"))]
FileName = Annotated[str, Field(max_length=200), matches("[A-Za-z0-9][A-Za-z0-9._-]*", _BEGIN.format(". _ -"))]
Variable = Annotated[str, matches("[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable")]


class Section(BaseModel):
    """Frozen; unknown keys are errors; the string after a field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def require_ascending(key: str, bounds: Bounds | None) -> None:
    """Raise ValueError unless the lower bound comes first."""
    if bounds is not None and bounds[0] >= bounds[1]:
        raise ValueError(f"{key}={list(bounds)}: the lower bound comes first; swap them")


def require_distinct(setting: str, values: Iterable[str]) -> None:
    """Raise ValueError with the first value that appears twice."""
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise ValueError(f"{setting}: {twice[0]!r} appears twice; give each its own")
