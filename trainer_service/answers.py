"""Stage 6, batch: tokenize corrections as the model would have sampled them.

The tokenizer of the model's folder converts the text once, here. The chat template determines the tokens between a
prompt and an answer, and the end of the answer; text of callers never becomes part of a template. The prompt's tokens
are the row's own. A prompt that does not end as the template's do is continued by the text as it is: that of a plain
completion, or of a message that the model was to continue. No answer is learned inside an open thought.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from shared.config import TrainerConfig
from shared.errors import StartupError
from shared.experience import Experience, TokenArray, Tokens, TrajectoryKey, trajectory_key

_STAND_IN = "STANDIN"  # placeholder for an answer in the rendered template
_QUESTION = [{"role": "user", "content": _STAND_IN}]
_OPENS_THOUGHT, _ENDS_THOUGHT = "<think>", "</think>"


class _Unusable(ValueError):
    """A correction cannot be learned from; the message is the reason."""


@dataclass(frozen=True, slots=True)
class _Template:
    """The text around an answer."""

    prompt: str = ""  # a prompt that the answer may follow
    before: str = ""  # an empty thought before the answer, or the rest of it, if the template writes one
    # up to its first control token, or else its first token, it ends the answer; "": the end-of-sequence token does
    after: str = ""


def control_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the special tokens, and added tokens that the chat template itself writes."""
    template, added = str(tokenizer.chat_template or ""), tokenizer.get_added_vocab().items()
    return frozenset(tokenizer.all_special_ids) | {number for text, number in added if text in template}


class AnswerTokenizer:
    """Adds the tokens of corrections to rows."""

    def __init__(self, tokenizer: Any, *, vocabulary: int, longest: int | None) -> None:
        """vocabulary: number of token ids of the model; longest: tokens of prompt and answer; None: unlimited.

        Raises StartupError if the chat template fails, or does not write an answer after its prompt.
        """
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._longest = longest
        self._special = [token for token in tokenizer.all_special_tokens if token]
        self._template = template = _read_template(tokenizer)
        self._prompt_ids, self._before_ids = self._encode(template.prompt), self._encode(template.before)
        after, control = self._encode(template.after), control_tokens(tokenizer)
        self._control = control
        marks = (template.before.find(text) for text in tokenizer.convert_ids_to_tokens(sorted(control)) if text)
        # where the first control token is in the text before an answer; None: there is none
        self._cut = min((place for place in marks if place >= 0), default=None)
        opening = self._encode(template.prompt.rpartition(_STAND_IN)[2])  # such as <|im_start|>assistant
        begin = max((n for n, token in enumerate(opening) if token in control), default=len(opening))
        self._opening = opening[begin:]  # ends a chat's prompt; empty: such prompts are not known from others
        ends = [*self._special, *template.before.split()[-1:], _ENDS_THOUGHT]
        self._ends = re.compile("|".join(map(re.escape, ends)))
        n_end = next((n for n, token in enumerate(after, 1) if token in control), None)
        # a control token is never joined with the text before it, as other tokens behind an answer may be
        self._end_ids = (after[:1] or [tokenizer.eos_token_id]) if n_end is None else []
        self._n_after = len(after) - (n_end or 0)

    def with_corrections(self, rows: Sequence[Experience], later: Collection[TrajectoryKey] = ()) -> list[Experience]:
        """Add the tokens of the last correction to each row; a correction of a whole is about its last reply.

        Turns that follow the correction, and are in the batch too, do not belong to that whole. later: trajectories
        whose corrections of the whole are about replies that are not among the rows.
        """
        last: dict[TrajectoryKey, int] = {}
        for row in sorted(rows, key=lambda row: row.id):
            key = trajectory_key(row)
            if key not in later and any(one.kind == "correction" and one.scope != "message" for one in row.signals):
                last[key] = row.id
        return [self._correct(row, is_last=last.get(trajectory_key(row)) == row.id) for row in rows]

    def _correct(self, row: Experience, *, is_last: bool) -> Experience:
        corrections = [
            signal for signal in row.signals if signal.kind == "correction" and (is_last or signal.scope == "message")
        ]
        if not corrections:
            return row
        last = corrections[-1]
        try:
            answer = self._answer(last.text or "", row.tokens)
            return replace(row, correction=answer, correction_key=last.key_name)
        except _Unusable as reason:
            return replace(row, unused=(*row.unused, str(reason)))

    def _answer(self, text: str, tokens: Tokens) -> TokenArray:
        """Return the tokens of an answer to a row's prompt. Raises _Unusable."""
        said = text.strip()
        if not said:
            raise _Unusable("correction_empty")
        if said in self._contents(tokens.reply_ids):
            raise _Unusable("correction_equals_reply")
        if any(token in text for token in self._special):
            raise _Unusable("correction_with_special_tokens")  # such text would end turns and start others
        has_thought = _ends_with(tokens.prompt_ids, [*self._opening, *self._before_ids])
        if self._template.prompt and (has_thought or _ends_with(tokens.prompt_ids, self._opening)):
            written = self._written(said, has_thought=has_thought)
        elif self._is_in_thought(tokens.prompt_ids):
            raise _Unusable("correction_in_thought")  # a reader of the reply would take it for the thought
        else:
            written = self._encode(f"{text}{self._template.after}")
        reply = [*written[: len(written) - self._n_after], *self._end_ids]
        if len(reply) <= 1 or max(reply) >= self._vocabulary:
            raise _Unusable("correction_outside_vocabulary")
        if self._longest is not None and len(tokens.prompt_ids) + len(reply) > self._longest:
            raise _Unusable("correction_too_long")
        return np.array(reply, np.int32)

    def _written(self, said: str, *, has_thought: bool) -> list[int]:
        """Return the tokens that follow a prompt of the template's. has_thought: it has the one before answers.

        Raises _Unusable if the first characters would change the prompt's last token.
        """
        template, known = self._template, [*self._prompt_ids, *(self._before_ids if has_thought else ())]
        if not has_thought and self._cut is not None:
            # the prompt's last token stays as it is: a control token is never joined with the text before it
            thought, rest = template.before[: self._cut], template.before[self._cut :]
            return [*self._encode(thought), *self._encode(f"{rest}{said}{template.after}")]
        whole = self._encode(f"{template.prompt}{template.before}{said}{template.after}")
        if whole[: len(known)] != known:
            raise _Unusable("correction_joins_prompt")
        return whole[len(known) :]

    def _is_in_thought(self, prompt_ids: TokenArray) -> bool:
        """Whether a prompt ends in a thought that is open."""
        begin = max((n for n, token in enumerate(prompt_ids.tolist()) if token in self._control), default=0)
        text: str = self._tokenizer.decode(prompt_ids[begin:])
        return text.rfind(_OPENS_THOUGHT) > text.rfind(_ENDS_THOUGHT)

    def _contents(self, reply_ids: TokenArray) -> tuple[str, str]:
        """Return the text of a reply, and its part after a thought, which is what callers may see of it."""
        parts = self._ends.split(self._tokenizer.decode(reply_ids))
        whole = self._tokenizer.decode(reply_ids, skip_special_tokens=True).strip()
        return whole, next((part.strip() for part in reversed(parts) if part.strip()), "")

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _ends_with(ids: TokenArray, end: Sequence[int]) -> bool:
    return not end or ids[-len(end) :].tolist() == list(end)


def answer_tokenizer(
    config: TrainerConfig, folder: Path, *, vocabulary: int, context: int | None
) -> AnswerTokenizer | None:
    """Load the tokenizer of a model's folder; None: no algorithm learns from corrections. Raises StartupError.

    vocabulary: number of token ids of the model; context: its maximum number of tokens; None: no known limit.
    """
    if "correction" not in config.learns_from:
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise StartupError(f"{folder}: corrections need the model's tokenizer ({exc}); add its files") from exc
    bounds = [bound for bound in (config.max_trajectory_tokens, context) if bound is not None]
    return AnswerTokenizer(tokenizer, vocabulary=vocabulary, longest=min(bounds, default=None))


def _read_template(tokenizer: Any) -> _Template:
    """Return the text that the chat template writes around an answer; empty without a template. Raises StartupError."""
    if tokenizer.chat_template is None:
        return _Template()
    answer = {"role": "assistant", "content": _STAND_IN}
    try:
        prompt = tokenizer.apply_chat_template(_QUESTION, tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template([*_QUESTION, answer], tokenize=False)
    except TemplateError as exc:
        raise StartupError(f"corrections need the model's chat template, which fails ({exc}); mend it") from exc
    before, found, after = whole.removeprefix(prompt).rpartition(_STAND_IN)
    if not whole.startswith(prompt) or not found:
        raise StartupError(
            "the model's chat template writes no answer after its prompt, so that corrections have no tokens; "
            "mend the template, or name no algorithm that learns from corrections"
        )
    return _Template(prompt, before, after)
