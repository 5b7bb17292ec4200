"""Reads the columns of a row of a file (row_files.py), and checks each before use.

Rows must meet the same conditions as data of callers, because the ledger and the trainer rely on them.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import numpy as np

from shared.config import RewardConfig
from shared.experience import LARGEST_TOP_K, CorruptTokens, Sampling, State, TokenArray, Tokens
from shared.ledger.conditions import MAX_ID_BYTES, split_name
from shared.ledger.tables import experiences, signals
from shared.ledger.transitions.feedback import MAX_SIGNALS
from shared.reward import Lesson, Scope, Signal

_NAMES = ("msg_id", "task_id", "run_id", "parent_id", "conversation_id", "key_name", "key_group", "finish_reason")
NOT_OURS = -1  # as `version_end`: of an imported row that no version of this ledger sampled to its end
_NUMBERS = {"choice": (0, 10**9 - 1), "version": (0, 2**31 - 1), "version_end": (NOT_OURS, 2**31 - 1)}
_DIGEST = re.compile(r"[0-9a-f]{16}")  # of explorer_service.chat.conversation
UNUSABLE = (CorruptTokens, AttributeError, KeyError, TypeError, ValueError, OverflowError)  # errors of a bad row


def names_of(row: dict[str, Any]) -> dict[str, str | None]:
    """Return the row's names as text; integers become their digits. Raises ValueError."""
    names = {name: _text(name, row.get(name), experiences.c[name].type.length) for name in _NAMES}  # type: ignore[attr-defined]
    for name in ("task_id", "run_id"):
        if len((names[name] or "").encode()) > MAX_ID_BYTES:
            raise ValueError(f"{name} has more than {MAX_ID_BYTES} bytes in UTF-8")
    return names


def _text(name: str, value: Any, most: int) -> str | None:
    if value is None or value == "":
        return None
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or len(text) > most or "\0" in text:
        raise ValueError(f"{name} is no text of at most {most} characters without NUL")
    return text


def choice_of(row: dict[str, Any], msg_id: str) -> tuple[str, int]:
    """Return the row's message and choice. ID#CHOICE as a message id is a choice of ID, as in feedback."""
    choice = number_of(row, "choice")
    if row.get("choice") is not None:
        return msg_id, choice
    message, named = split_name(msg_id)
    return (message, named) if message and named is not None else (msg_id, choice)


def number_of(row: dict[str, Any], name: str) -> int:
    """Return the row's choice, version or version_end; 0 if it has none. Raises ValueError."""
    value, (lowest, highest) = row.get(name), _NUMBERS[name]
    if value is not None and (type(value) is not int or not lowest <= value <= highest):
        raise ValueError(f"{name} is no number of a {name.removesuffix('_end')}")
    return value or 0


def version_end_of(row: dict[str, Any]) -> int:
    """Return the version that sampled the last token: the row's version if it names no other. Raises ValueError."""
    return number_of(row, "version" if row.get("version_end") is None else "version_end")


def time_of(row: dict[str, Any], default: float) -> float:
    """Return when the row was sampled, Unix seconds. Raises ValueError."""
    value = row.get("created_at")
    return default if value is None else _finite(value, "created_at is no time in Unix seconds")


def _finite(value: Any, complaint: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(complaint)
    return float(value)


def conversation_of(row: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Return the row's messages and tools. Raises ValueError."""
    messages, tools = row.get("messages") or [], row.get("tools")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages is no list of messages")
    if tools is not None and not isinstance(tools, list):
        raise ValueError("tools is no list")
    return messages, tools


def texts_of(row: dict[str, Any]) -> tuple[bytes | None, bytes | None]:
    """Return the row's request and reply as the ledger stores them; None for what it does not have. Raises ValueError.

    The request is that of the messages, with the fields of `request` beside them.
    """
    messages, tools = conversation_of(row)
    request, reply = (row.get(name) if isinstance(row.get(name), dict) else None for name in ("request", "reply"))
    if messages:
        request = {**(request or {}), "messages": messages[:-1], **({"tools": tools} if tools else {})}
        reply = messages[-1]
    encode = msgspec.json.encode
    return None if request is None else encode(request), None if reply is None else encode(reply)


def exchange_of(row: dict[str, Any]) -> bytes | None:
    """Return the stored digest of the messages including the reply; None if the row has none."""
    stored = row.get("exchange")
    return bytes.fromhex(stored) if isinstance(stored, str) and _DIGEST.fullmatch(stored) else None


def tokens_of(row: dict[str, Any]) -> tuple[Tokens, Sampling]:
    """Return the tokens of a row that has them, and its sampling parameters. Raises errors of bad data."""
    for name in ("prompt_ids", "reply_ids", "logprobs"):
        if not isinstance(row.get(name), list):
            raise ValueError(f"{name} is no list, and a row with prompt_ids needs one; add it, or give messages alone")
    sampling = {name: type(getattr(Sampling(), name))(value) for name, value in (row.get("sampling") or {}).items()}
    if "top_k" in sampling:
        sampling["top_k"] = min(max(sampling["top_k"], 0), LARGEST_TOP_K)  # as of a chat
    prompt_ids, reply_ids = (_token_ids(row[name]) for name in ("prompt_ids", "reply_ids"))
    logprobs = np.array(row["logprobs"], np.float32)
    if any(array.ndim != 1 for array in (prompt_ids, reply_ids, logprobs)):
        raise CorruptTokens("its prompt_ids, reply_ids or logprobs are lists within a list")
    return Tokens(prompt_ids, reply_ids, logprobs), Sampling(**sampling)


def _token_ids(given: Sequence[int]) -> TokenArray:
    """Return token ids. Raises CorruptTokens for other values: they are neither rounded nor wrapped around."""
    found = np.array(given)
    if found.size and (found.dtype.kind not in "iu" or found.min() < 0 or found.max() > np.iinfo(np.int32).max):
        raise CorruptTokens("something among its token ids is none")
    return found.astype(np.int32)


def signals_of(row: dict[str, Any], rule: RewardConfig) -> list[Signal]:
    """Return the row's signals, oldest first, or its rewards if it has none. Raises ValidationError and ValueError.

    Exported signals were accepted when they were sent; a reward without signals is checked here.
    """
    exported = [replace(one, id=None) for one in msgspec.convert(row.get("signals") or [], list[Signal])]
    if len(exported) > MAX_SIGNALS:
        raise ValueError(f"it has {len(exported)} signals; a row may have {MAX_SIGNALS}")
    for one in exported:
        _check(one)
    reward = row.get("reward")
    if exported or reward is None:
        return exported
    return _rewards(row, reward, rule)


def _rewards(row: dict[str, Any], reward: Any, rule: RewardConfig) -> list[Signal]:
    """Return the rewards of a row without signals as signals: of the row, or of the whole with its `outcome`."""
    whole: Scope = "conversation" if row.get("task_id") is None or row.get("run_id") is None else "run"
    outcome, own = row.get("outcome"), reward if row.get("outcome") is None else row.get("turn_reward")
    said: list[Signal] = []
    for value, scope in ((outcome, whole), (own, "message")):
        if value is not None:
            number = _finite(value, "reward is no finite number")
            require_accepted(number, rule)
            said.append(Signal("reward", number, scope=scope))
    return said if own is None or own == reward else said[::-1]  # `reward` is the last one that was sent


class TrainedVersion(msgspec.Struct):
    """A version that was trained on a row."""

    manifest_sha256: str
    consumed: bool  # as in the table `lineage`


class Trained(msgspec.Struct):
    """What a row was trained on, as `export --tokens` writes it."""

    lessons: Annotated[int, msgspec.Meta(ge=0, lt=2 * max(Lesson))]
    manifest_sha256: str  # of the first version that was trained on it
    versions: list[TrainedVersion] = []  # all of them; an older Flywheel wrote only the first


def trained_of(row: dict[str, Any]) -> Trained | None:
    """Return what the row was trained on; None: nothing, or unknown. Raises ValidationError."""
    return msgspec.convert(row.get("trained"), Trained | None)


def quarantine_of(row: dict[str, Any]) -> str | None:
    """Return why the row was in quarantine; None: it was not, or the file does not say so. Raises ValueError."""
    reason = row.get("reason")
    if row.get("state") != State.DISCARDED or reason is None:
        return None
    if not isinstance(reason, str) or "\0" in reason:
        raise ValueError("reason is no text")
    return reason if reason.startswith("quarantined:") else None


def require_accepted(reward: float | None, rule: RewardConfig) -> None:
    """Raise ValueError for a reward that callers may not send."""
    if reward is None:
        return
    lowest, highest = rule.accept or (-sys.float_info.max, sys.float_info.max)
    if not lowest <= reward <= highest:
        raise ValueError(f"reward {reward:g} is outside of reward.accept={[lowest, highest]}")


def _check(signal: Signal) -> None:
    """Raise ValueError for a signal that lacks what its kind requires."""
    kind = signal.kind
    if kind in ("reward", "metric"):
        _finite(signal.value, f"a {kind} without a finite number")
    elif kind == "rating" and signal.text not in ("up", "down"):
        raise ValueError("a rating that is neither up nor down")
    elif kind != "demonstration" and signal.text is None:
        raise ValueError(f"a {kind} without a text")
    if kind == "metric" and signal.name is None:
        raise ValueError("a metric without a name")
    if "\0" in (signal.text or ""):
        raise ValueError(f"NUL in a {kind}")
    for name in ("name", "key_name"):
        _text(f"{name} of a {kind}", getattr(signal, name), signals.c[name].type.length)  # type: ignore[attr-defined]
