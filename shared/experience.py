"""An experience: one sampled choice, and the compact encoding of its tokens.

Owns the row that stages record, claim and batch pass along, and the byte layout of its token arrays. Knows nothing of
SQL or HTTP.
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import FlywheelError

TokenArray = npt.NDArray[np.int32]
LogprobArray = npt.NDArray[np.float32]


_last_stamp = 0  # microseconds


def new_message_id(prefix: str) -> str:
    """A unique id: its microsecond, so that the ledger's indexes grow at one end, and 72 random bits nobody guesses.

    Each of a process is greater than the one before.
    """
    global _last_stamp  # noqa: PLW0603 — threads that race for it get equal stamps, and random bits all the same
    _last_stamp = max(time.time_ns() // 1000, _last_stamp + 1)
    return f"{prefix}{_last_stamp:014x}{os.urandom(9).hex()}"


class State(StrEnum):
    """Where a row stands between chat and training."""

    RECORDED = "RECORDED"  # sampled; may have a reward; waits for a commit
    READY = "READY"  # committed: rewarded and to be trained on
    LEASED = "LEASED"  # held by a trainer
    CONSUMED = "CONSUMED"  # trained on: the version in consumed_version contains it
    DISCARDED = "DISCARDED"  # out, with a reason


class CorruptTokens(FlywheelError):
    """A row's token arrays cannot be read or do not agree; the row is to be quarantined with this reason."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one sample, exactly as the engine saw and sampled them.

    prompt_ids: [P] int32; reply_ids: [R] int32; logprobs: [R] float32, the sampler's own, natural logarithm.
    """

    prompt_ids: TokenArray
    reply_ids: TokenArray
    logprobs: LogprobArray

    # magic, layout, bytes of an id (layout 1 left it 0 and meant 4), 2 bytes reserved, prompt length, reply length;
    # then the arrays, little-endian. Three bytes hold an id of any vocabulary up to 16 million.
    _HEADER = struct.Struct("<4sBB2xII")
    _MAGIC = b"FWTK"
    _LAYOUT = 2

    def check(self) -> None:
        """Raise CorruptTokens unless the arrays agree in length and every logprob is finite and ≤ 0 (+ rounding)."""
        if len(self.reply_ids) != len(self.logprobs):
            raise CorruptTokens(f"{len(self.reply_ids)} reply tokens but {len(self.logprobs)} logprobs")
        if not len(self.prompt_ids) or not len(self.reply_ids):
            raise CorruptTokens(f"{len(self.prompt_ids)} prompt tokens and {len(self.reply_ids)} reply tokens")
        if not np.isfinite(self.logprobs).all() or (self.logprobs > 1e-3).any():
            raise CorruptTokens("a logprob is not a finite number of at most 0")

    def encode(self) -> bytes:
        """The arrays as bytes: 16 bytes of header, 2 to 4 for each id, 4 for each logprob."""
        ids = np.concatenate((self.prompt_ids, self.reply_ids)).astype("<u4", copy=False)
        largest = int(ids.max(initial=0))
        width = 2 if largest < 1 << 16 else 3 if largest < 1 << 24 else 4
        return b"".join(
            (
                self._HEADER.pack(self._MAGIC, self._LAYOUT, width, len(self.prompt_ids), len(self.reply_ids)),
                ids.view(np.uint8).reshape(-1, 4)[:, :width].tobytes(),  # the low bytes come first
                self.logprobs.astype("<f4", copy=False).tobytes(),
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> Tokens:
        """The inverse of `encode`. Raises CorruptTokens for bytes that `encode` did not write."""
        if len(data) < cls._HEADER.size:
            raise CorruptTokens(f"{len(data)} bytes are no token arrays")
        magic, layout, width, n_prompt, n_reply = cls._HEADER.unpack_from(data)
        width = 4 if layout == 1 else width
        if magic != cls._MAGIC or layout not in (1, cls._LAYOUT) or width not in (2, 3, 4):
            raise CorruptTokens(f"unknown layout {magic!r} {layout} {width}")
        n_ids = n_prompt + n_reply
        if len(data) != cls._HEADER.size + width * n_ids + 4 * n_reply:
            raise CorruptTokens(f"{len(data)} bytes for {n_prompt} prompt and {n_reply} reply tokens")
        low = np.frombuffer(data, dtype=np.uint8, offset=cls._HEADER.size, count=width * n_ids).reshape(n_ids, width)
        ids = np.zeros((n_ids, 4), dtype=np.uint8)
        ids[:, :width] = low
        logprobs = np.frombuffer(data, dtype="<f4", offset=cls._HEADER.size + width * n_ids, count=n_reply)
        ids_flat = ids.view("<i4").reshape(n_ids)
        return cls(ids_flat[:n_prompt], ids_flat[n_prompt:], logprobs)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens were sampled: what the trainer needs to compute the same logprobs."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What the explorer records for one choice: stage 2's input."""

    msg_id: str
    choice: int
    version: int  # the version that sampled the first token
    version_end: int  # the version that sampled the last one; differs when weights changed in between
    tokens: Tokens
    sampling: Sampling
    finish_reason: str | None
    created_at: float  # Unix seconds
    latency_s: float
    parent_id: str | None = None
    task_id: str | None = None
    run_id: str | None = None
    key_name: str | None = None
    key_group: str | None = None
    request: bytes | None = None  # JSON of the request's messages, tools and sampling parameters
    reply: bytes | None = None  # JSON of the reply's message
    quarantine: str | None = None  # why this sample must not be trained on
    exchange: bytes | None = None  # digest of all messages up to and with the reply
    extends: tuple[bytes, ...] = ()  # digests of the exchanges that it may continue, longest first


@dataclass(frozen=True, slots=True)
class Experience:
    """A leased row as the trainer sees it."""

    id: int
    msg_id: str
    choice: int
    parent_id: str | None
    task_id: str | None
    run_id: str | None
    conversation_id: str
    version: int
    reward: float
    created_at: float
    tokens: Tokens
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Lease:
    """Rows that one trainer holds: one batch."""

    batch_id: int
    rows: list[Experience]
    corrupt: dict[int, str] = field(default_factory=dict)  # row id → reason; quarantined, not trained on


JSON = dict[str, Any]
