"""Stage 6, batch: comments and other words about a turn become a block of tokens before the row's own tokens.

Comments and corrections are tokenized here, once, with the model's own tokenizer. The tokens of the user's next message
are taken from the prompt of the row that continues this one. The rows' own tokens do not change.

Words are data. A text never produces a special token, or an added token that the chat template itself writes: with them
a comment could end its message and start another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from shared.config import HintConfig
from shared.errors import StartupError, first_line
from shared.experience import Experience, choice_name
from shared.reward import Lesson
from trainer_service.algorithms.seam import Batch, Ints, Words
from trainer_service.answers import control_tokens

_TEXT, _REPLY = "<flywheel-text>", "<flywheel-reply>"  # placeholders in a rendered template, where it is cut
_LARGEST_TOKEN = 32  # characters; a text is cut to so many for each token that it may have, before it is tokenized
_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Frame:
    """The text that a chat template writes around a message."""

    before: Ints
    after: Ints
    control: frozenset[int]  # tokens that only the template writes
    user: Ints  # start of a user's message after a reply; empty: unknown
    tool: Ints  # start of a tool's result, if it begins like a user's message


def add_words(batch: Batch, rows: Iterable[Experience]) -> None:
    """Add to a batch the hints of its rows, and the logprobs of their replies by a remote teacher."""
    by_id = {row.id: row for row in rows}
    for place in (place for places in batch.members for place in places):
        sequence, begin = batch.sequences[place], 0
        for row_id, end in zip(sequence.row_ids, sequence.ends, strict=True):
            row, actions, begin = by_id[row_id], np.arange(begin, end + 1), end + 1
            if row.teacher is not None:
                taught = batch.taught.setdefault(place, np.full(len(sequence.actions), np.nan, np.float32))
                taught[actions] = row.teacher
            add_words_of(batch, place, row, actions)


def add_words_of(batch: Batch, place: int, row: Experience, actions: Ints) -> None:
    """Add a row's hint to one of a batch's sequences. actions: which of the sequence's actions are the row's."""
    if row.hint is not None:
        reward = row.reward if row.turn_reward is None else row.turn_reward
        words = Words(row.hint.astype(np.int64), actions, reward, row.hint_key)
        batch.words.setdefault(place, []).append(words)


class HintWriter:
    """Builds blocks of tokens from the words about rows."""

    def __init__(self, tokenizer: Any, config: HintConfig, window: int | None) -> None:
        """window: maximum number of tokens of the model; None: unlimited."""
        self._tokenizer, self._config, self._window = tokenizer, config, window
        self._frame = _frame(tokenizer)

    @classmethod
    def load(cls, folder: Path, config: HintConfig) -> HintWriter:
        """Use the tokenizer and the window of the model in a folder. Raises StartupError."""
        from transformers import AutoConfig, AutoTokenizer

        try:
            about = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as exc:
            raise StartupError(
                f"{folder} has no tokenizer that can be loaded ({first_line(exc)}); add it to model.path"
            ) from exc
        return cls(tokenizer, config, getattr(about, "max_position_embeddings", None))

    def write(self, rows: Sequence[Experience]) -> list[Experience]:
        """Add to each row the words about it as a block of tokens, or the reason why it has none.

        With `top_k: 0`, not to rehearsed rows: the loss of a sampled token is a policy gradient, for new samples only.
        """
        following = {row.parent_id: row for row in sorted(rows, key=lambda row: -row.id) if row.parent_id is not None}
        return [
            row
            if row.is_rehearsal and not self._config.top_k
            else self._with_hint(row, following.get(choice_name(row.msg_id, row.choice)))
            for row in rows
        ]

    def _with_hint(self, row: Experience, following: Experience | None) -> Experience:
        pieces = list(self._pieces(row, following))
        if not pieces:
            return row
        block = self._block(pieces)
        if not len(block):
            return replace(row, unused=(*row.unused, "empty_words"))
        length = len(block) + len(row.tokens.prompt_ids) + len(row.tokens.reply_ids)
        if self._window is not None and length > self._window:
            return replace(row, unused=(*row.unused, "words_fill_the_window"))
        return replace(row, hint=block.astype(np.int32), hint_key=self._key(row, following))

    def _pieces(self, row: Experience, following: Experience | None) -> Iterator[tuple[str, Ints]]:
        """Yield the wording and the tokens of each text about a row.

        Of each key, these are the last comment on the turn, the last one on the whole, and the last correction of the
        turn, or else of the whole, which is about the whole's last reply.
        """
        last = {(signal.kind, signal.key_name, signal.scope == "message"): signal.text or "" for signal in row.signals}
        for kind, wording in (("correction", self._config.correction), ("comment", self._config.comment)):
            for (one, key, is_own), text in last.items():
                is_replaced = kind == "correction" and not is_own and (kind, key, True) in last
                if one == kind and wording is not None and not is_replaced:
                    yield wording, self._tokens(text)
        acts = row.acts & Lesson.NEXT_MESSAGE
        if self._config.next_message is not None and acts and following is not None:
            message = self._message_in(row, following)
            if len(message):
                yield self._config.next_message, message

    def _key(self, row: Experience, following: Experience | None) -> str | None:
        """Return the key that wrote the block: of the last comment or correction, or else of the chat with the next
        message."""
        wordings = {"correction": self._config.correction, "comment": self._config.comment}
        said = [one for one in row.signals if wordings.get(one.kind) is not None and (one.text or "").strip()]
        return said[-1].key_name if said else following.key_name if following is not None else None

    def _block(self, pieces: list[tuple[str, Ints]]) -> Ints:
        """Return one message with all texts, with at most `max_hint_tokens` tokens of them; empty without a text."""
        left, parts = self._config.max_hint_tokens, [self._frame.before]
        for wording, text in pieces:
            if not len(text) or not left:
                continue
            before, after = wording.split("{text}")
            parts += [_encode(self._tokenizer, before), text[:left], _encode(self._tokenizer, f"{after}\n")]
            left -= min(left, len(text))
        return np.concatenate([*parts, self._frame.after]) if len(parts) > 1 else _NOTHING

    def _tokens(self, text: str) -> Ints:
        """Tokenize a caller's text without special tokens."""
        limit = self._config.max_hint_tokens
        plain = text[: _LARGEST_TOKEN * limit].strip().encode(errors="replace").decode()
        ids = _encode(self._tokenizer, plain, split_special_tokens=True)
        return ids[~np.isin(ids, list(self._frame.control))][:limit]

    def _message_in(self, row: Experience, following: Experience) -> Ints:
        """Return the tokens of the user's message after a row's reply, from the next prompt; empty if it has none."""
        own = np.concatenate([row.tokens.prompt_ids, row.tokens.reply_ids])
        prompt, header = following.tokens.prompt_ids, self._frame.user
        if not len(header) or not np.array_equal(prompt[: len(own)], own):
            return _NOTHING
        rest = prompt[len(own) :].astype(np.int64)
        tool, is_control = self._frame.tool, np.isin(rest, list(self._frame.control))
        for start in range(len(rest) - len(header)):
            if not np.array_equal(rest[start : start + len(header)], header):
                continue
            if len(tool) and np.array_equal(rest[start : start + len(tool)], tool):
                continue
            begin = start + len(header)
            ends = np.flatnonzero(is_control[begin:])
            return rest[begin : begin + ends[0]] if len(ends) else rest[begin:]
        return _NOTHING


def _encode(tokenizer: Any, text: str, **options: bool) -> Ints:
    ids = tokenizer(text, add_special_tokens=False, verbose=False, **options)["input_ids"]
    return np.asarray(ids, np.int64)


def _frame(tokenizer: Any) -> _Frame:
    """Read what a tokenizer's chat template writes; without a template, words are a paragraph of plain text."""
    encode = partial(_encode, tokenizer)
    control = control_tokens(tokenizer)
    around = _cut(tokenizer, _message("system")) or _cut(tokenizer, _message("user"))
    if around is None:
        return _Frame(_NOTHING, encode("\n\n"), control, _NOTHING, _NOTHING)

    def begins(role: str) -> Ints:
        found = _cut(tokenizer, _message("user", "?"), _message("assistant", _REPLY), _message(role))
        ids = encode(found[0].rpartition(_REPLY)[2]) if found and _REPLY in found[0] else _NOTHING
        ids = ids[1:] if len(ids) and ids[0] in control else ids  # the token that ends a reply may be part of it
        places = np.flatnonzero(np.isin(ids, list(control)))
        return ids[places[0] :] if len(places) else _NOTHING

    user, tool = begins("user"), begins("tool")
    return _Frame(encode(around[0]), encode(around[1]), control, user, tool if _extends(tool, user) else _NOTHING)


def _extends(longer: Ints, shorter: Ints) -> bool:
    return len(longer) > len(shorter) and np.array_equal(longer[: len(shorter)], shorter)


def _message(role: str, content: str = _TEXT) -> dict[str, str]:
    return {"role": role, "content": content}


def _cut(tokenizer: Any, *messages: dict[str, str]) -> tuple[str, str] | None:
    """Return what a chat template writes before and after _TEXT; None if it does not accept these messages."""
    if not tokenizer.chat_template:
        return None
    try:
        before, found, after = tokenizer.apply_chat_template(list(messages), tokenize=False).partition(_TEXT)
    except TemplateError:
        return None
    return (before, after) if found else None
