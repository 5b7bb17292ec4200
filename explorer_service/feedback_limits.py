"""Limits of one feedback request: its targets, signals and texts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from explorer_service.api.errors import bad_request
from shared.config import RewardConfig
from shared.reward import Signal

MAX_TARGETS = 10_000
MAX_NAME = 200  # characters of a metric's name, the length of the ledger's column
MAX_MSG_ID = 220  # characters of ID#CHOICE
MAX_OF_A_KIND = 100  # metrics, or entries of preferred_over
MAX_TEXT_BYTES = 64 * 1024  # of a comment or a correction
MAX_STORED_BYTES = 16 * 1024 * 1024  # of texts and names: each target row stores its own copy
MAX_ROWS = 100_000  # of a task, a run or conversations
FIND_TIMEOUT_S = 60.0  # to find the rows, in many statements, each with its own limit
SLICE_COST = 50.0  # of one transaction; see cost_of_row
AT_ONCE_COST = 50.0  # of named messages in one transaction, with all their choices


def check_choice(field: str, value: str | None, allowed: Collection[str]) -> None:
    """Raise ApiError 400 if a field has none of the allowed values."""
    if value is not None and value not in allowed:
        raise bad_request(f"{field} must be {' or '.join(allowed)}", field)


def check_targets(msg_ids: Sequence[str]) -> None:
    """Raise ApiError 400 if a limit is exceeded."""
    if len(msg_ids) > MAX_TARGETS:
        raise bad_request(f"at most {MAX_TARGETS} msg_ids in one request", "msg_ids")
    for name in msg_ids:
        if len(name) > MAX_MSG_ID or "\x00" in name:
            raise bad_request(f"a message id has at most {MAX_MSG_ID} characters, and no NUL", "msg_ids")


def check_signals(signals: Sequence[Signal]) -> None:
    """Raise ApiError 400 if a limit is exceeded."""
    for kind, param in (("metric", "metrics"), ("preferred_over", "preferred_over")):
        if sum(signal.kind == kind for signal in signals) > MAX_OF_A_KIND:
            raise bad_request(f"at most {MAX_OF_A_KIND} {param} in one request", param)
    for signal in signals:
        field = _field(signal)
        if len(signal.name or "") > MAX_NAME:
            raise bad_request(f"a metric's name has at most {MAX_NAME} characters", field)
        if signal.kind == "preferred_over" and len(signal.text or "") > MAX_MSG_ID:
            raise bad_request(f"a message id has at most {MAX_MSG_ID} characters", field)
        if _bytes(signal) > MAX_TEXT_BYTES:
            raise bad_request(f"a {signal.kind} has at most {MAX_TEXT_BYTES} bytes", field)
        if "\x00" in (signal.text or "") + (signal.name or ""):
            raise bad_request("text must not contain NUL", field)


def check_rewards(reward: float | None, metrics: Mapping[str, float], rule: RewardConfig) -> None:
    """Raise ApiError 400 for a reward, or a metric times its weight, outside `reward.accept`.

    A metric is only a part of a reward, so 0 is always allowed. With `reward.clip`, metrics are not checked.
    """
    if rule.accept is None:
        return
    lowest, highest = rule.accept
    if reward is not None and not lowest <= reward <= highest:
        raise bad_request(f"reward must be between {lowest:g} and {highest:g}", "reward")
    for name in metrics.keys() & rule.metrics.keys() if rule.clip is None else ():
        part = rule.metrics[name] * metrics[name]
        if not min(lowest, 0.0) <= part <= max(highest, 0.0):
            reason = f"metric {name} gives a reward of {part:g}; it must be between {lowest:g} and {highest:g}"
            raise bad_request(f"{reason} (reward.accept, reward.metrics)", "metrics")


def require_room(signals: Sequence[Signal], rows: int) -> None:
    """Raise ApiError 400 if the texts and names, stored once for each row, are too large."""
    size = rows * sum(map(_bytes, signals))
    if size > MAX_STORED_BYTES:
        needed = f"the texts and the names of metrics need {size} bytes for {rows} messages, at most {MAX_STORED_BYTES}"
        raise bad_request(f"{needed}; name fewer messages", _field(max(signals, key=_bytes)))


def cost_of_row(signals: Sequence[Signal]) -> float:
    """Return the cost of these signals for one row: 1 for each signal, and for each 2,000 bytes of text and names."""
    return len(signals) + sum(map(_bytes, signals)) / 2000


def _field(signal: Signal) -> str:
    return "metrics" if signal.kind == "metric" else signal.kind


def _bytes(signal: Signal) -> int:
    return len(((signal.name or "") + (signal.text or "")).encode())
