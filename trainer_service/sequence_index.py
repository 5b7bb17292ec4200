"""Finds the sequences of one trajectory, and its turns, by their tokens."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

_WIDTH = 8  # bytes of an int64
_digest = partial(hashlib.blake2b, digest_size=16)


class SequenceIndex:
    """Finds the sequences of one trajectory by their tokens. Branches and sub-agents create several sequences.

    It compares digests, so that the cost of a row does not depend on the number of sequences.
    """

    def __init__(self) -> None:
        self._open: dict[bytes, list[int]] = {}  # digest of a whole sequence: numbers of the sequences, as a heap
        self._lengths: Counter[int] = Counter()  # number of open sequences by length in tokens
        self._prompts: dict[bytes, int] = {}  # digest of a prompt: first turn that answers it
        self._turns: dict[bytes, int] = {}  # digest of a sequence up to the end of a turn: first such turn
        self._turn_lengths: set[int] = set()  # lengths of the token sequences in _turns
        self.equal: list[int] = []  # by turn: the first turn whose sequence, up to its end, has the same tokens

    def add(self, number: int, turn: int, prompt_ids: npt.NDArray[Any], token_ids: npt.NDArray[Any]) -> None:
        """Record that a sequence now ends with the turn that answers this prompt. token_ids: all of its tokens."""
        key = _digest(_bytes(token_ids)).digest()
        heapq.heappush(self._open.setdefault(key, []), number)
        self._lengths[len(token_ids)] += 1
        self._prompts.setdefault(_digest(_bytes(prompt_ids)).digest(), turn)
        self.equal.append(self._turns.setdefault(key, turn))
        self._turn_lengths.add(len(token_ids))

    def take(self, prompt_ids: npt.NDArray[Any]) -> int | None:
        """Remove and return the longest sequence that the prompt begins with, of equal ones the first; None: none.

        None, too, if the prompt goes on with the tokens of a turn that other turns continue: it continues that turn.
        """
        longest = [prefix for prefix in _prefixes(prompt_ids, self._lengths) if prefix[0] in self._open][-1:]
        if not longest:
            return None
        [(key, length)] = longest
        longer = (other for other in self._turn_lengths if other > length)
        if any(digest in self._turns for digest, _ in _prefixes(prompt_ids, longer)):
            return None
        number = heapq.heappop(self._open[key])
        if not self._open[key]:
            del self._open[key]
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
        return number

    def answered(self, prompt_ids: npt.NDArray[Any]) -> int | None:
        """Return the first turn that answers this prompt; None: none."""
        return self._prompts.get(_digest(_bytes(prompt_ids)).digest())

    def turns_in(self, prompt_ids: npt.NDArray[Any]) -> list[int]:
        """Return the turns whose sequences, up to their ends, the prompt begins with, shortest first."""
        passed = (self._turns.get(key) for key, _ in _prefixes(prompt_ids, self._turn_lengths))
        return [turn for turn in passed if turn is not None]


def _prefixes(prompt_ids: npt.NDArray[Any], lengths: Iterable[int]) -> Iterator[tuple[bytes, int]]:
    """Yield digest and length of the prompt's prefixes of these lengths, shortest first."""
    data, digest, done = _bytes(prompt_ids), _digest(), 0
    for length in sorted(length for length in lengths if length <= len(prompt_ids)):
        digest.update(data[_WIDTH * done : _WIDTH * length])
        done = length
        yield digest.digest(), length


def _bytes(token_ids: npt.NDArray[Any]) -> memoryview:
    return memoryview(token_ids.astype(np.int64).tobytes())
