"""Computes a reward from signals by the section `reward`. Signals are stored raw, so the rule may change.

r = clip( e + Σ_m w_m · metric_m )      e: the last explicit reward; without one, the value of the last rating
Of each kind of signal, only the last one counts. Signals about a message make its own reward; signals about a whole
that it belongs to make the outcome. A row without any of these signals has no reward.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Literal

from shared.config import SCORES as SCORES
from shared.config import Kind as Kind
from shared.config import RewardConfig

_LARGEST = sys.float_info.max

# What a signal is about: this message, or a whole: a run, a conversation, or several messages of one trajectory.
Scope = Literal["message", "run", "conversation", "messages"]


class Lesson(IntFlag):
    """What a row is trained on, each once. All signals that the rule turns into a reward are one lesson."""

    REWARD = 1
    COMMENT = 2
    CORRECTION = 4
    PREFERENCE = 8
    DEMONSTRATION = 16
    NEXT_MESSAGE = 32  # the user's, in the row that continues this one


_LESSONS: dict[Kind, int] = {  # plain numbers: those of the enumeration are slow, and feedback has many rows
    **dict.fromkeys(SCORES, int(Lesson.REWARD)),
    "comment": int(Lesson.COMMENT),
    "correction": int(Lesson.CORRECTION),
    "preferred_over": int(Lesson.PREFERENCE),
    "demonstration": int(Lesson.DEMONSTRATION),
}
EVERY_LESSON = int(~Lesson(0))
WORDS: frozenset[Kind] = frozenset(("comment", "correction", "preferred_over"))  # all of them act, not only the last


def lessons_of(kinds: Iterable[Kind]) -> int:
    """Return the lessons of signals of these kinds."""
    lessons = 0
    for kind in kinds:
        lessons |= _LESSONS[kind]
    return lessons


@dataclass(frozen=True, slots=True)
class Signal:
    """One piece of feedback about a message.

    value: of a reward or metric. name: of a metric. text: of a rating ("up", "down"), comment, correction, or the
    message id that this message is preferred over. key_name: the key that sent it.
    """

    kind: Kind
    value: float | None = None
    name: str | None = None
    text: str | None = None
    scope: Scope = "message"
    key_name: str | None = field(default=None, compare=False)
    id: int | None = field(default=None, compare=False)  # in the log; None: not stored yet


@dataclass(frozen=True, slots=True)
class Credit:
    """The rewards and lessons that a row gets from its signals."""

    reward: float | None  # the latest of its own reward and the outcome
    turn_reward: float | None  # its own
    outcome: float | None  # of the whole that it belongs to
    teaches: int  # Lesson: lessons in its signals that are learned from, and that it was not trained on yet


def identity_of(words: Signal) -> Hashable:
    """Return what two signals share if one repeats the words of the other: the same key says the same."""
    return words.kind, words.text, words.key_name


class NewWords:
    """Tells which words of a row's log are new: they have not acted on the row, and repeat none of their key.

    `has` takes all signals of the row, oldest first.
    """

    def __init__(self, taught: int, last_signal: int, log: Iterable[Signal] = ()) -> None:
        """taught: lessons that the row was trained on. last_signal: the last signal in the log at that time.

        log: earlier signals.
        """
        self._taught, self._last_signal = taught, last_signal
        self._seen: set[Hashable] = set()
        for signal in log:
            self.has(signal)

    def has(self, signal: Signal) -> bool:
        """Whether the signal is new words."""
        if signal.kind not in WORDS:
            return False
        words = identity_of(signal)
        repeats = words in self._seen
        self._seen.add(words)
        acted = signal.id is not None and signal.id <= self._last_signal and lessons_of([signal.kind]) & self._taught
        return not (acted or repeats)


def credit_of(
    signals: Sequence[Signal], rule: RewardConfig, learned: frozenset[Kind], taught: int = 0, last_signal: int = 0
) -> Credit:
    """Return the credit of a row from its signals, oldest first. learned: the kinds that are learned from.

    taught, last_signal: see NewWords.
    """
    own = reward_of((signal for signal in signals if signal.scope == "message"), rule)
    outcome = reward_of((signal for signal in signals if signal.scope != "message"), rule)
    scores = [one for one in signals if one.kind in SCORES and has_effect(one, rule.metrics)]
    last = own if scores and scores[-1].scope == "message" else outcome
    once = {one.kind for one in (*scores, *(one for one in signals if one.kind not in SCORES | WORDS))}
    teaches = lessons_of(once & learned) & ~taught
    new = NewWords(taught, last_signal)
    words = {one.kind for one in signals if new.has(one)}
    return Credit(last, own, outcome, teaches | lessons_of(words & learned))


def has_effect(signal: Signal, metrics: Collection[str]) -> bool:
    """Whether a signal can have an effect: all do, except metrics without a weight. metrics: those with one."""
    return signal.kind != "metric" or signal.name in metrics


def reward_key(signals: Sequence[Signal]) -> str | None:
    """Return the key that set the reward of these signals, oldest first: the one that sent the last signal of the
    highest rank (explicit reward, rating, metric). None: there is no such signal, or it has no key."""
    for kind in ("reward", "rating", "metric"):
        keys = [signal.key_name for signal in signals if signal.kind == kind]
        if keys:
            return keys[-1]
    return None


def reward_of(signals: Iterable[Signal], rule: RewardConfig) -> float | None:
    """Return the reward of the signals, oldest first; None if no signal counts."""
    explicit: float | None = None
    rated: float | None = None
    metrics: dict[str, float] = {}
    for signal in signals:
        if signal.kind == "reward":
            explicit = signal.value
        elif signal.kind == "rating":
            rated = rule.up if signal.text == "up" else rule.down
        elif signal.kind == "metric" and signal.name in rule.metrics and signal.value is not None:
            weighted = rule.metrics[signal.name] * signal.value  # of finite numbers, and may overflow
            metrics[signal.name] = min(max(weighted, -_LARGEST), _LARGEST)
    parts = [part for part in (explicit if explicit is not None else rated, *metrics.values()) if part is not None]
    if not parts:
        return None
    total = sum(parts)
    if rule.clip is not None:
        total = min(max(total, rule.clip[0]), rule.clip[1])
    return min(max(float(total), -_LARGEST), _LARGEST)  # a sum of finite numbers may overflow
