"""An experience: one sampled choice, its states, and the compact encoding of its tokens.

Owns the row that the stages record, claim and batch exchange, and the byte layout of its token arrays. A field of
Sample, Sampling or Experience that is a column has the column's name (ledger/tables/). Uses neither SQL nor HTTP.
"""

from __future__ import annotations

import math
import os
import struct
import time
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shared.errors import FlywheelError
from shared.reward import EVERY_LESSON, Lesson, Signal

TokenArray = npt.NDArray[np.int32]
LogprobArray = npt.NDArray[np.float32]

LARGEST_TOP_K = 2**31 - 1  # maximum of the ledger's column; like all values above the vocabulary, it has no effect
_last_stamp = 0  # microseconds


def new_message_id(prefix: str) -> str:
    """Return a unique id: microseconds, so that the ledger's indexes grow at one end, and 72 unpredictable random bits.

    Each id of a process is greater than the one before.
    """
    global _last_stamp  # noqa: PLW0603 — threads in a race get equal stamps, but different random bits
    _last_stamp = max(time.time_ns() // 1000, _last_stamp + 1)
    return f"{prefix}{_last_stamp:014x}{os.urandom(9).hex()}"


class Attributed(Protocol):
    """The columns of a row that determine its trajectory."""

    @property
    def id(self) -> int: ...
    @property
    def task_id(self) -> str | None: ...
    @property
    def run_id(self) -> str | None: ...
    @property
    def key_group(self) -> str | None: ...
    @property
    def conversation_id(self) -> str | None: ...


TrajectoryKey = tuple[str | int | None, ...]


def trajectory_key(row: Attributed, task_id: str | None = None, run_id: str | None = None) -> TrajectoryKey:
    """Return the key of a row's trajectory: its run within a group of keys, or else its conversation.

    task_id and run_id: used if the row has none.
    """
    task_id = task_id if row.task_id is None else row.task_id
    run_id = run_id if row.run_id is None else row.run_id
    if task_id is not None and run_id is not None:
        return row.key_group, task_id, run_id
    return (row.id if row.conversation_id is None else row.conversation_id,)


def choice_name(msg_id: str, choice: int) -> str:
    """Return the name of one choice: ID for the first, ID#CHOICE for another."""
    return f"{msg_id}#{choice}" if choice else msg_id


class State(StrEnum):
    """The state of a row between chat and training."""

    RECORDED = "RECORDED"  # sampled; may have a reward; waits for a commit
    READY = "READY"  # committed: its trajectory has a signal that is learned from; to be trained on
    LEASED = "LEASED"  # claimed by a trainer
    CONSUMED = "CONSUMED"  # trained on: consumed_version contains it
    DISCARDED = "DISCARDED"  # never trained on, for a reason


class BatchState(StrEnum):
    """The state of a batch."""

    LEASED = "LEASED"  # claimed by a trainer
    CONSUMED = "CONSUMED"  # consumed_version contains it
    RETURNED = "RETURNED"  # its rows are READY again, or were all quarantined


class VersionState(StrEnum):
    """The state of a version. ledger/transitions/versions.py defines the transitions."""

    RESERVED = "RESERVED"  # a trainer has reserved the number and writes the folder
    PUBLISHED = "PUBLISHED"  # written; no engine has proven it yet
    SERVING = "SERVING"  # an engine has proven that it serves it
    RETIRED = "RETIRED"  # has served; no engine serves it now
    SKIPPED = "SKIPPED"  # a newer version served first
    REJECTED = "REJECTED"  # final: damaged or not reproducible, never served again
    FAILED = "FAILED"  # engines crashed or hung on it, and none has proven it; can be retried


class Purpose(StrEnum):
    """Why a version's files are kept for a reader."""

    LOADING = "loading"  # an engine is about to load them
    SERVING = "serving"  # an engine reads them while it serves
    UNLOADING = "unloading"  # an engine has or may have them, and gets no requests for them
    PINNED = "pinned"  # callers pin the version
    ENGINE = "engine"  # an engine's process was started on them
    PARENT = "parent"  # a trainer starts from them
    DELTA_BASE = "delta-base"  # a later version's delta applies to them
    EXPORT = "export"  # an operator copies them


MAY_SERVE = (VersionState.PUBLISHED, VersionState.SERVING, VersionState.RETIRED)


class CorruptTokens(FlywheelError):
    """A row's token arrays cannot be read or do not agree. Rows are counted by this reason, so it states no lengths."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one sample, exactly as the engine received and sampled them.

    prompt_ids: [P] int32; reply_ids: [R] int32; logprobs: [R] float32, the sampler's, natural logarithm.
    """

    prompt_ids: TokenArray
    reply_ids: TokenArray
    logprobs: LogprobArray

    # magic, layout, bytes of an id (0 in layout 1, which means 4), 2 reserved bytes, prompt length, reply length;
    # then the arrays, little-endian. Three bytes can store an id of any vocabulary up to 16 million.
    _HEADER = struct.Struct("<4sBB2xII")
    _MAGIC = b"FWTK"
    _LAYOUT = 2

    def check(self, vocabulary: int | None = None, max_tokens: int | None = None) -> None:
        """Raise CorruptTokens unless the arrays agree in length and every logprob is finite and ≤ 0 (+ rounding).

        vocabulary: number of token ids of the model; max_tokens: of prompt and reply; None: not checked.
        """
        if len(self.reply_ids) != len(self.logprobs):
            raise CorruptTokens("it does not have one logprob for each reply token")
        if not len(self.prompt_ids) or not len(self.reply_ids):
            raise CorruptTokens(f"it has no {'reply' if len(self.prompt_ids) else 'prompt'} tokens")
        if not np.isfinite(self.logprobs).all() or (self.logprobs > 1e-3).any():
            raise CorruptTokens("a logprob is not a finite number of at most 0")
        ids = (self.prompt_ids, self.reply_ids)
        if vocabulary is not None and any(part.min() < 0 or part.max() >= vocabulary for part in ids):
            raise CorruptTokens(f"a token id is outside of the model's vocabulary of {vocabulary}")
        if max_tokens is not None and sum(map(len, ids)) > max_tokens:
            most = f"the {max_tokens} that are trained on (trainer.max_trajectory_tokens, else the model's context)"
            raise CorruptTokens(f"it has more tokens than {most}")

    def encode(self) -> bytes:
        """Encode the arrays as bytes: 16 bytes of header, 2 to 4 for each id, 4 for each logprob."""
        ids = np.concatenate((self.prompt_ids, self.reply_ids)).astype("<u4", copy=False)
        largest = int(ids.max(initial=0))
        width = 2 if largest < 1 << 16 else 3 if largest < 1 << 24 else 4
        header = self._HEADER.pack(self._MAGIC, self._LAYOUT, width, len(self.prompt_ids), len(self.reply_ids))
        packed = ids.view(np.uint8).reshape(-1, 4)[:, :width].tobytes()  # the low bytes are first
        return header + packed + self.logprobs.astype("<f4", copy=False).tobytes()

    @classmethod
    def decode(cls, data: bytes) -> Tokens:
        """The inverse of `encode`. Raises CorruptTokens for bytes that `encode` did not write."""
        if len(data) < cls._HEADER.size:
            raise CorruptTokens("its bytes are no token arrays")
        magic, layout, width, n_prompt, n_reply = cls._HEADER.unpack_from(data)
        width = 4 if layout == 1 else width
        if magic != cls._MAGIC or layout not in (1, cls._LAYOUT) or width not in (2, 3, 4):
            raise CorruptTokens(f"unknown layout {magic!r} {layout} {width}")
        n_ids = n_prompt + n_reply
        if len(data) != cls._HEADER.size + width * n_ids + 4 * n_reply:
            raise CorruptTokens("its token arrays are not as long as their header says")
        low = np.frombuffer(data, dtype=np.uint8, offset=cls._HEADER.size, count=width * n_ids).reshape(n_ids, width)
        ids = np.zeros((n_ids, 4), dtype=np.uint8)
        ids[:, :width] = low
        logprobs = np.frombuffer(data, dtype="<f4", offset=cls._HEADER.size + width * n_ids, count=n_reply)
        ids_flat = ids.view("<i4").reshape(n_ids)
        return cls(ids_flat[:n_prompt], ids_flat[n_prompt:], logprobs)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters that the trainer needs to reproduce the logprobs."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # divides the positive logits of tokens in prompt or reply, multiplies the others
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the reply
    frequency_penalty: float = 0.0  # the same, for each time that a token is in the reply
    masked: bool = False  # tokens were forced or forbidden in a way that the trainer cannot reproduce

    def check(self) -> None:
        """Raise CorruptTokens for values that no sampler accepts: logits would not be numbers."""
        if not all(math.isfinite(value) for value in astuple(self)) or self.temperature < 0:
            raise CorruptTokens(f"it was sampled with values that no sampler takes: {self}")
        if self.repetition_penalty <= 0:
            raise CorruptTokens(f"repetition_penalty={self.repetition_penalty} is not above 0")


@dataclass(frozen=True, slots=True)
class Sample:
    """One choice as the explorer records it: the input of stage 2."""

    msg_id: str
    choice: int
    version: int  # sampled the first token
    version_end: int  # sampled the last token; -1: no version of this ledger did
    tokens: Tokens
    sampling: Sampling
    finish_reason: str | None
    created_at: float  # Unix seconds
    latency_s: float
    task_id: str | None = None
    run_id: str | None = None
    key_name: str | None = None
    key_group: str | None = None
    request: bytes | None = None  # the request's JSON; only the first choice of a message has it
    reply: bytes | None = None  # JSON of the reply's message
    quarantine: str | None = None  # why this sample must not be trained on
    exchange: bytes | None = None  # digest of all messages up to and including the reply
    extends: tuple[bytes, ...] = ()  # digests of the exchanges that it may continue, longest first


@dataclass(frozen=True, slots=True)
class Other:
    """A reply that a leased row is preferred over. It is only read, not leased."""

    name: str  # choice_name()
    tokens: Tokens
    sampling: Sampling
    key: str | None = None  # that sent the preference


@dataclass(frozen=True, slots=True)
class Experience:
    """A leased row, as the trainer uses it."""

    id: int
    msg_id: str
    choice: int
    parent_id: str | None
    task_id: str | None
    run_id: str | None
    conversation_id: str
    version: int
    reward: float | None  # the latest of its own reward and the outcome; also if rewards have acted on it before
    created_at: float
    tokens: Tokens
    sampling: Sampling
    turn_reward: float | None = None  # its own reward, if it also has an outcome
    outcome: float | None = None  # the reward of the whole that it belongs to; it counts once
    key_group: str | None = None
    key_name: str | None = None  # the key that sent the chat
    version_end: int | None = None  # sampled the last token
    finish_reason: str | None = None
    signals: tuple[Signal, ...] = ()  # of the kinds that are learned from and act in this batch, oldest first
    preferred_over: tuple[Other, ...] = ()  # replies to the same prompt
    correction: TokenArray | None = None  # tokens of the right answer, with the end of turn
    correction_key: str | None = None  # the key that wrote it
    teacher: LogprobArray | None = None  # log p of the reply's tokens by a teacher behind an endpoint
    hint: TokenArray | None = None  # words about it, as tokens to place before its own
    hint_key: str | None = None  # the key that wrote the last of them
    unused: tuple[str, ...] = ()  # why signals about it cannot be learned from, one reason each
    acts: int = EVERY_LESSON  # Lesson: what it is trained on in this batch
    is_rehearsal: bool = False  # trained on before: only its written answer and words are trained on again

    @property
    def is_rewarded(self) -> bool:
        """Whether rewards act on it in this batch."""
        return bool(self.acts & Lesson.REWARD)

    @property
    def own_reward(self) -> float | None:
        """The row's own reward, without the outcome; None if rewards have acted on it before."""
        if not self.is_rewarded:
            return None
        return self.reward if self.outcome is None else self.turn_reward


@dataclass(frozen=True, slots=True)
class Lease:
    """Rows that one trainer has claimed: one batch."""

    batch_id: int
    rows: list[Experience]
    corrupt: dict[int, str] = field(default_factory=dict)  # row id → reason; quarantined, not trained on


JSON = dict[str, Any]
