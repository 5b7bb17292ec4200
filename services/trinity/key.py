"""One row of the table: a Trinity key, or several with the same result, and its conversion."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from shared.errors import ConfigError

_CHOICE = re.compile(r"\{([^{}]*)\}")
_LONGEST = 100  # maximum characters of a value in an error


class Fate(StrEnum):
    """The result for a key."""

    KEPT = "kept"
    RENAMED = "renamed"
    NOT_NEEDED = "not needed"
    NO_COUNTERPART = "no counterpart"


class NotNeeded(Exception):
    """Raised by a take: with this value, the key is not needed here. The text tells why."""


class NoCounterpart(Exception):
    """Raised by a take: the requested feature does not exist here. The text tells what to do."""

    def __init__(self, what_to_do: str, *, changes_training: bool = False) -> None:
        super().__init__(what_to_do)
        self.changes_training = changes_training


def refusal(name: str, value: Any) -> ConfigError:
    """Return the error for an unreadable value."""
    shown = repr(value)
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"
    return ConfigError(f"{name}={shown} is no value that Trinity takes; correct it")


class Given(dict[str, Any]):
    """The values of a Trinity configuration by dotted key; items of lists are keyed by number."""

    is_a_pair = False  # of an explorer's and a trainer's file, with a process for each

    @property
    def has_tasks(self) -> bool:
        """Whether a task set is explored; a trainer alone has none."""
        sets = ("buffer.explorer_input.taskset.", "buffer.explorer_input.tasksets.", "data.dataset_path")
        return self.get("mode") != "train" and any(name.startswith(sets) for name in self)

    def first(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of these keys that has one."""
        return next((self[name] for name in names if self.get(name) is not None), default)

    def whole(self, *names: str, default: int, most: int | None = None) -> int:
        """Return the value of the first of these keys that has one, an integer from 1 to `most`. Raises ConfigError."""
        name = next((name for name in names if self.get(name) is not None), None)
        if name is None:
            return default
        try:
            number = int(self[name])
        except (TypeError, ValueError, OverflowError) as exc:
            raise refusal(name, self[name]) from exc
        if number < 1 or (most is not None and number > most):
            raise refusal(name, self[name])
        return number


Settings = Mapping[str, Any]
Take = Callable[[Any, Given], Settings]


@dataclass(frozen=True)
class Key:
    """The conversion of one key, or of several with the same result.

    names: dotted; `{a,b}` means either, `*` any one part, `**` at the end all keys below. to: our key, where `*` is the
    last part of theirs, or a description. note: why the key is not needed, what to do without it, or a remark. off:
    values with which a key without a counterpart requests nothing special; None: a key without `to` is not needed with
    any value. same: why it is not needed with these values. take: returns our settings from the value and the whole
    file; raises NotNeeded or NoCounterpart.
    """

    names: str
    to: str = ""
    note: str = ""
    off: tuple[Any, ...] | None = None
    changes_training: bool = False
    take: Take | None = None
    same: str = "as it is here"

    def settings(self, name: str, value: Any, given: Given) -> Settings:
        """Return our settings by their dotted keys. Raises NotNeeded, NoCounterpart."""
        if value is None:
            raise NotNeeded("no value")
        if self.take is not None:
            return self.take(value, given)
        if self.to:
            return {self.to.replace("*", name.rpartition(".")[2]): value}
        if self.off is None or value in self.off or str(value).lower() in [str(one).lower() for one in self.off]:
            raise NotNeeded(self.note if self.off is None else self.same)
        raise NoCounterpart(self.note, changes_training=self.changes_training)


def moved(names: str, to: str, note: str = "", take: Take | None = None) -> Key:
    """Return a key with a counterpart."""
    return Key(names, to, note, take=take)


def unneeded(names: str, why: str) -> Key:
    """Return a key without effect here."""
    return Key(names, note=why)


def lost(
    names: str, what_to_do: str, off: tuple[Any, ...] = (), *, changes_training: bool = False, same: str = Key.same
) -> Key:
    """Return a key without a counterpart, unless it is off."""
    return Key(names, note=what_to_do, off=(*off, "", {}, []), changes_training=changes_training, same=same)


def expand(names: str) -> Iterator[str]:
    """Yield the names that a pattern with `{a,b}` matches."""
    texts, choices = _CHOICE.split(names)[::2], [choice.split(",") for choice in _CHOICE.findall(names)]
    for picked in itertools.product(*choices):
        yield "".join(text + choice for text, choice in itertools.zip_longest(texts, picked, fillvalue=""))
