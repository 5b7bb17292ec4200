"""Stage 6, batch: what was said of rows, beside rewards, reaches their sequences.

What is said of a message is said of its reply alone. Where turns are merged, that turn becomes a sequence of its own;
it begins as the merged one does, and folding computes the beginning once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from shared.experience import Experience, Other, TokenArray, Tokens, TrajectoryKey, choice_name, trajectory_key
from trainer_service.algorithms.seam import Batch
from trainer_service.hints import add_words, add_words_of
from trainer_service.trajectories import TokenSequence, sequence_of, trajectories_of


def make_batch(rows: Sequence[Experience]) -> Batch:
    """The trajectories of rows, with what was said of them."""
    again = [row for row in rows if row.is_rehearsal]
    rows = sorted((row for row in rows if not row.is_rehearsal), key=lambda row: row.id)
    batch = Batch.of(trajectories_of(rows))
    replies = _Replies(batch, rows)
    written = [replies.place(row) for row in rows if any(one.kind == "demonstration" for one in row.signals)]
    pairs = [(replies.place(row), replies.place_of(other, row)) for row in rows for other in row.preferred_over]
    for row in rows:
        if row.correction is not None:
            written.append(batch.add(_answer(row, row.correction)))
            pairs.append((written[-1], replies.place(row)))
    add_words(batch, rows)
    unused = Counter(reason for row in rows for reason in row.unused)
    rehearsed, written_before = _add_rehearsed(batch, again)
    return replace(
        batch,
        written=[*written, *written_before],
        rehearsed=rehearsed,
        pairs=pairs,
        ratings=_ratings(batch, rows, replies),
        unused={reason: float(count) for reason, count in sorted(unused.items())},
    )


class _Replies:
    """Single replies as sequences of a batch: those of its rows, and those that they are preferred over."""

    def __init__(self, batch: Batch, rows: Sequence[Experience]) -> None:
        self._batch = batch
        self._rows = {choice_name(row.msg_id, row.choice): row for row in rows}
        alone = [(one.row_ids[0], place) for place, one in enumerate(batch.sequences) if len(one.row_ids) == 1]
        self._places: dict[int | str, int] = dict(alone)  # by row id; of what is no row of the batch by name

    def place(self, row: Experience) -> int:
        """The place of a row's reply."""
        return self._place(row.id, row)

    def place_of(self, other: Other, row: Experience) -> int:
        """The place of a reply that a row is preferred over."""
        if other.name in self._rows:
            return self.place(self._rows[other.name])
        return self._place(other.name, replace(row, tokens=other.tokens, sampling=other.sampling))

    def _place(self, key: int | str, row: Experience) -> int:
        if key not in self._places:
            self._places[key] = self._batch.add(sequence_of(row))
        return self._places[key]


def _answer(row: Experience, reply_ids: TokenArray) -> TokenSequence:
    """A written answer to a row's prompt. Nobody sampled it: it has no importance weight."""
    tokens = Tokens(row.tokens.prompt_ids, reply_ids, np.zeros(len(reply_ids), np.float32))
    return sequence_of(replace(row, tokens=tokens, sampling=replace(row.sampling, masked=True)))


def _add_rehearsed(batch: Batch, again: Sequence[Experience]) -> tuple[dict[int, str | None], list[int]]:
    """Add rows that were trained on before, for what was written and said of them.

    Returns the places of their sequences, each with the key that spoke last; and which of them were written.
    """
    keys: dict[int, str | None] = {}
    written: list[int] = []
    for row in again:
        answers = [batch.add(sequence) for sequence in _answers(row)]
        written += answers
        spoken = [] if row.hint is None else [batch.add(sequence_of(row))]
        for place in spoken:
            add_words_of(batch, place, row, np.arange(len(row.tokens.reply_ids)))
        keys |= dict.fromkeys([*answers, *spoken], row.signals[-1].key_name)
    return keys, written


def _answers(row: Experience) -> Iterator[TokenSequence]:
    """The answers that were written for a row."""
    if any(one.kind == "demonstration" for one in row.signals):
        yield _answer(row, row.tokens.reply_ids)
    if row.correction is not None:
        yield _answer(row, row.correction)


def _ratings(batch: Batch, rows: Sequence[Experience], replies: _Replies) -> dict[int, bool]:
    """By place: the last rating of a message; or of a whole, which is about each of its sequences."""
    of_message: dict[int, bool] = {}
    of_whole: dict[TrajectoryKey, bool] = {}
    for row in rows:
        for rating in (one for one in row.signals if one.kind == "rating"):
            if rating.scope == "message":
                of_message[replies.place(row)] = rating.text == "up"
            else:
                of_whole[trajectory_key(row)] = rating.text == "up"
    keys = {row.id: trajectory_key(row) for row in rows if row.is_rewarded}
    rated = {
        place: of_whole[keys[row_id]]
        for places in batch.members
        for place in places
        if keys.get(row_id := batch.sequences[place].row_ids[0]) in of_whole
    }
    return rated | of_message
