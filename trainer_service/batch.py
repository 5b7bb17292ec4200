"""Stage 6, batch: attach signals other than rewards to sequences.

A signal about a message concerns only its reply. If the turn was merged into a longer sequence, it also becomes a
sequence of its own. The two share a prefix, which folding computes once.
A place is an index into `Batch.sequences`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from shared.experience import Experience, Other, TokenArray, Tokens, TrajectoryKey, choice_name, trajectory_key
from shared.reward import Kind, Signal
from trainer_service.algorithms.seam import Batch, Said, Speakers
from trainer_service.hints import add_words, add_words_of
from trainer_service.trajectories import TokenSequence, sequence_of, trajectories_of


def make_batch(rows: Sequence[Experience]) -> Batch:
    """Build the trajectories of rows, with the signals about them."""
    again = [row for row in rows if row.is_rehearsal]
    rows = sorted((row for row in rows if not row.is_rehearsal), key=lambda row: row.id)
    batch = Batch.of(trajectories_of(rows))
    replies = _Replies(batch, rows)
    answers = {replies.place(row): _last_key(row, "demonstration") for row in rows if is_demonstration(row)}
    pairs = {
        (replies.place(row), replies.place_of(other, row)): other.key for row in rows for other in row.preferred_over
    }
    for row in rows:
        if row.correction is not None:
            place = batch.add(_answer(row, row.correction))
            answers[place] = pairs[place, replies.place(row)] = row.correction_key
    add_words(batch, rows)
    unused = Counter(reason for row in rows for reason in row.unused)
    rehearsed, written_before = _add_rehearsed(batch, again)
    answers |= written_before
    ratings = _ratings(batch, rows, replies)
    said_by: Speakers = {(Said.ANSWER, (place,)): key for place, key in answers.items()}
    said_by |= {(Said.PREFERENCE, pair): key for pair, key in pairs.items()}
    said_by |= {(Said.RATING, (place,)): rating.key_name for place, rating in ratings.items()}
    return replace(
        batch,
        written=list(answers),
        rehearsed=rehearsed,
        pairs=list(pairs),
        ratings={place: rating.text == "up" for place, rating in ratings.items()},
        said_by=said_by,
        unused={reason: float(count) for reason, count in sorted(unused.items())},
    )


class _Replies:
    """The sequences that hold a single reply: of the batch's rows, and of replies that these are preferred over."""

    def __init__(self, batch: Batch, rows: Sequence[Experience]) -> None:
        self._batch = batch
        self._rows = {choice_name(row.msg_id, row.choice): row for row in rows}
        alone = [(one.row_ids[0], place) for place, one in enumerate(batch.sequences) if len(one.row_ids) == 1]
        self._places: dict[int | str, int] = dict(alone)  # by row id; replies outside the batch by choice name

    def place(self, row: Experience) -> int:
        """Return the place of a row's reply."""
        return self._place(row.id, row)

    def place_of(self, other: Other, row: Experience) -> int:
        """Return the place of a reply that a row is preferred over."""
        if other.name in self._rows:
            return self.place(self._rows[other.name])
        return self._place(other.name, replace(row, tokens=other.tokens, sampling=other.sampling))

    def _place(self, key: int | str, row: Experience) -> int:
        if key not in self._places:
            self._places[key] = self._batch.add(sequence_of(row))
        return self._places[key]


def _answer(row: Experience, reply_ids: TokenArray) -> TokenSequence:
    """Return a written answer to a row's prompt. It was not sampled, so its importance weights are 1."""
    tokens = Tokens(row.tokens.prompt_ids, reply_ids, np.zeros(len(reply_ids), np.float32))
    return sequence_of(replace(row, tokens=tokens, sampling=replace(row.sampling, masked=True)))


def _add_rehearsed(batch: Batch, again: Sequence[Experience]) -> tuple[list[int], dict[int, str | None]]:
    """Add rows that were trained on before, to repeat their written answers and hints.

    Returns the places of all their sequences, and the places of written answers with the keys that wrote them.
    """
    rehearsed: list[int] = []
    written: dict[int, str | None] = {}
    for row in again:
        answers = {batch.add(sequence): key for sequence, key in _answers(row)}
        written |= answers
        spoken = [] if row.hint is None else [batch.add(sequence_of(row))]
        for place in spoken:
            add_words_of(batch, place, row, np.arange(len(row.tokens.reply_ids)))
        rehearsed += [*answers, *spoken]
    return rehearsed, written


def _answers(row: Experience) -> Iterator[tuple[TokenSequence, str | None]]:
    """Yield the written answers of a row, each with the key that wrote it."""
    if is_demonstration(row):
        yield _answer(row, row.tokens.reply_ids), _last_key(row, "demonstration")
    if row.correction is not None:
        yield _answer(row, row.correction), row.correction_key


def is_demonstration(row: Experience) -> bool:
    """Whether a row's reply was written and not sampled, and is learned as such in this batch."""
    return any(one.kind == "demonstration" for one in row.signals)


def _last_key(row: Experience, kind: Kind) -> str | None:
    """Return the key that sent the last signal of this kind."""
    return [one.key_name for one in row.signals if one.kind == kind][-1]


def _ratings(batch: Batch, rows: Sequence[Experience], replies: _Replies) -> dict[int, Signal]:
    """Return ratings by place: the last rating of a message; a rating of a whole applies to each of its sequences."""
    of_message: dict[int, Signal] = {}
    of_whole: dict[TrajectoryKey, Signal] = {}
    for row in rows:
        for rating in (one for one in row.signals if one.kind == "rating"):
            if rating.scope == "message":
                of_message[replies.place(row)] = rating
            else:
                of_whole[trajectory_key(row)] = rating
    keys = {row.id: trajectory_key(row) for row in rows if row.is_rewarded}
    rated = {
        place: of_whole[keys[row_id]]
        for places in batch.members
        for place in places
        if keys.get(row_id := batch.sequences[place].row_ids[0]) in of_whole
    }
    return rated | of_message
