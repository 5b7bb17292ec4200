"""Requests to the explorer and its responses: bodies, retries and results, without any I/O.

A call is a generator: it yields an `Ask` (send this) or a `Pause` (wait this long), receives the outcome, and returns
the result. Client and AsyncClient drive the same generators, so that each rule exists once.
"""

from __future__ import annotations

import json
import math
import random
import re
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar
from urllib.parse import SplitResult, urlsplit

from flywheel.errors import Away, ConfigError, FlywheelError, NothingKnown, Refused, Unreachable
from flywheel.results import Committed, Receipt, Receipts, Status, Version

if TYPE_CHECKING:
    from typing_extensions import TypedDict

    class Saying(TypedDict, total=False):
        """The fields of feedback; see Client.feedback."""

        reward: float | None
        rating: Literal["up", "down"] | None
        metrics: Mapping[str, float] | None
        comment: str | None
        correction: str | None
        preferred_over: Sequence[str]
        scope: Literal["message", "conversation"] | None
        each: bool


_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 8.0
_POLL_S = 0.5  # between two requests of GET /ready
_READY_S = 30.0  # how long one of them may take
UNSERVED = frozenset({502, 503, 504})  # no engine serves, or a proxy got no answer from the explorer
_RETRIED = UNSERVED | {408, 429}
_KEY = re.compile(r"[A-Za-z0-9_-]{1,80}")


class Ask(NamedTuple):
    """A request to send."""

    method: str
    path: str
    body: bytes | None = None
    key: str | None = None  # Idempotency-Key
    query: Mapping[str, str] | None = None
    limit_s: float | None = None  # how long an answer is awaited; None: as the client's owner says


class Pause(NamedTuple):
    """Time to wait before the next request."""

    seconds: float


class Answer(NamedTuple):
    """A response."""

    status: int
    headers: Mapping[str, str]
    content: bytes


T = TypeVar("T")
Outcome = Answer | Unreachable | None  # of an Ask: a response or its lack; of a Pause: None
Steps = Generator[Ask | Pause, Outcome, T]


def encode(body: Mapping[str, Any]) -> bytes:
    """Encode JSON, with equal bytes for equal bodies, as an Idempotency-Key requires. Raises ConfigError."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"the feedback is no JSON: {exc}; give strings, finite numbers and lists of them") from exc


def feedback_body(
    msg_ids: str | Sequence[str], task_id: str | None, run_id: str | None, said: Mapping[str, Any]
) -> dict[str, Any]:
    """Build and check the body of a feedback. A truth value becomes 1 or 0. Raises ConfigError naming the argument."""
    ids = _as_list(msg_ids)
    metrics = {name: to_number(value) for name, value in (said.get("metrics") or {}).items()}
    said = {**said, "reward": to_number(said.get("reward")), "metrics": metrics or None}
    if not ids and task_id is None:
        raise ConfigError("feedback has no target: give msg_ids, or task_id with or without run_id")
    check_number("reward", said["reward"])
    for name, value in metrics.items():
        check_number(f"metrics[{name!r}]", value)
    if said.get("rating") not in (None, "up", "down"):
        raise ConfigError(f'rating={said["rating"]!r}: give "up" or "down"')
    body: dict[str, Any] = {"msg_ids": ids, "task_id": task_id, "run_id": run_id}
    for name, value in said.items():
        if value is not None and value is not False and value != ():
            body[name] = _as_text(_as_list(value) if name == "preferred_over" else value)
    return {name: value for name, value in body.items() if value not in (None, [])}


def _as_list(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def to_number(value: Any) -> Any:
    """Convert a truth value, or another type's number such as numpy's, to a float; the rest is left to check_number."""
    if value is None or type(value) in (int, float) or isinstance(value, (str, bytes)):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def _as_text(value: Any) -> Any:
    """Replace NUL and each lone surrogate by "?": a model may write them, and the explorer stores neither."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode().replace("\0", "?")
    if isinstance(value, Mapping):
        return {_as_text(name): _as_text(one) for name, one in value.items()}
    return [_as_text(one) for one in value] if isinstance(value, list) else value


def check_number(name: str, value: object) -> None:
    """Raise ConfigError unless the value is None or a finite number."""
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name}={value!r}: give a finite number")


def exchange(ask: Ask, retry_s: float) -> Steps[Answer]:
    """Send a request; retry without a response, or after 408, 429, 502, 503 or 504, until retry_s have passed.

    Raises Unreachable and Away. Feedback has an Idempotency-Key, so that repeats have no effect; commits and operators'
    calls name a state to reach.
    """
    deadline, pause_s = time.monotonic() + retry_s, _FIRST_PAUSE_S
    while True:
        outcome = yield ask
        if isinstance(outcome, Answer) and outcome.status not in _RETRIED:
            return outcome
        asked_s = _retry_after_s(outcome) if isinstance(outcome, Answer) else None
        wait_s = max(asked_s or 0.0, pause_s) * random.uniform(1.0, 1.25)  # so that callers do not retry in step
        if time.monotonic() + wait_s > deadline:
            raise _final_error(ask, outcome, asked_s)
        yield Pause(wait_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _retry_after_s(answer: Answer) -> float | None:
    try:
        return max(0.0, float(answer.headers.get("retry-after", "")))
    except ValueError:
        return None


def _final_error(ask: Ask, outcome: Outcome, retry_after_s: float | None) -> FlywheelError:
    if isinstance(outcome, Answer):
        message, code, _ = _read_error(outcome)
        return Away(outcome.status, f"{ask.method} {ask.path}: {message}", code=code, retry_after_s=retry_after_s)
    assert outcome is not None
    return outcome


def call_json(ask: Ask, retry_s: float) -> Steps[dict[str, Any]]:
    """Send a request whose response is a JSON object. Raises Refused, Away and Unreachable."""
    answer = yield from exchange(ask, retry_s)
    if answer.status >= 400:
        raise _refusal(ask, answer)
    return read_object(answer)


def _refusal(ask: Ask, answer: Answer) -> Refused:
    message, code, param = _read_error(answer)
    return Refused(answer.status, f"{ask.method} {ask.path}: {message}", code=code, param=param)


def read_object(answer: Answer) -> dict[str, Any]:
    """Return the JSON object of a response. Raises Refused for anything else, such as a proxy's page."""
    try:
        content = json.loads(answer.content)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        head = answer.content[:80].decode(errors="replace")
        raise Refused(answer.status, f"the answer is no JSON object: {head!r}; does FLYWHEEL_URL name an explorer?")
    return content


def _read_error(answer: Answer) -> tuple[str, str | None, str | None]:
    try:
        error = json.loads(answer.content)["error"]
        return f"{answer.status} {error['message']}", error.get("code"), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{answer.status} {answer.content[:200].decode(errors='replace')}", None, None


def send_feedback(body: Mapping[str, Any], key: str | None, unknown_ok: bool, retry_s: float) -> Steps[Receipts]:
    """POST /feedback. Raises NothingKnown, unless unknown_ok, if the explorer knows none of the targets."""
    if key is not None and not _KEY.fullmatch(key):
        raise ConfigError(f"idempotency_key={key!r}: give 1 to 80 letters, digits, _ or -")
    ask = Ask("POST", "/feedback", encode(body), key or uuid.uuid4().hex)
    answer = yield from exchange(ask, retry_s)
    content = read_object(answer)
    if answer.status == 404 and "receipts" in content:
        if not unknown_ok:
            raise NothingKnown("the explorer knows none of the targets of this feedback", receipts=content["receipts"])
    elif answer.status >= 400:
        raise _refusal(ask, answer)
    receipts = tuple(Receipt(one["msg_id"], one["state"]) for one in content.get("receipts", []))
    return Receipts(int(content.get("applied", 0)), receipts)


def send_commit(task_id: str | None, run_id: str | None, before: float | None, retry_s: float) -> Steps[Committed]:
    """POST /commit, which may be repeated."""
    check_number("before", before)
    body = encode({"task_id": task_id, "run_id": run_id, "time_threshold": before})
    content = yield from call_json(Ask("POST", "/commit", body), retry_s)
    return Committed(int(content.get("committed", 0)), int(content.get("ready", 0)))


def get_versions(retry_s: float) -> Steps[list[Version]]:
    """GET /versions, part by part from the newest one. Oldest first."""
    found: list[dict[str, Any]] = []
    query: dict[str, str] = {}
    while True:
        content = yield from call_json(Ask("GET", "/versions", query=query), retry_s)
        found = content["versions"] + found
        if content.get("next") is None:
            return [Version(v["version"], v["state"], v.get("parent"), v.get("reason"), v) for v in found]
        query = {"before": str(content["next"])}


def get_ledger_made(retry_s: float) -> Steps[float | None]:
    """GET /versions: when version 0 was made; None without one."""
    content = yield from call_json(Ask("GET", "/versions", query={"before": "1"}), retry_s)
    return next((v["created_at"] for v in content["versions"]), None)


def get_status(retry_s: float) -> Steps[Status]:
    """GET /status."""
    return Status((yield from call_json(Ask("GET", "/status"), retry_s)))


def get_ready(timeout_s: float) -> Steps[None]:
    """Wait for GET /ready. Raises Unreachable or Away after timeout_s, with its last response."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            limit_s = max(_POLL_S, min(deadline - time.monotonic(), _READY_S))
            answer = yield from exchange(Ask("GET", "/ready", limit_s=limit_s), 0.0)
            if answer.status == 200:
                return
            raise Refused(answer.status, f"GET /ready: {_read_error(answer)[0]}")
        except (Away, Unreachable):
            if time.monotonic() + _POLL_S > deadline:
                raise
        yield Pause(_POLL_S)


def get_run(task_id: str, run_id: str | None, retry_s: float) -> Steps[list[dict[str, Any]] | None]:
    """GET /runs: the recorded rows of a run; None if the explorer has no such route, or the key may not read."""
    query = {"task_id": task_id, **({} if run_id is None else {"run_id": run_id})}
    try:
        content = yield from call_json(Ask("GET", "/runs", query=query), retry_s)
    except Refused as exc:
        if exc.status in (403, 404, 405, 501):
            return None
        raise
    return list(content.get("rows") or [])


def check_key(key: str | None) -> None:
    """Raise ConfigError, without the key, for one that no header can carry: it would look as if nobody answered."""
    if key is not None and not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ConfigError("the key has a line break, a space at an end or a letter outside ASCII: see FLYWHEEL_KEY")


def _has_port(parts: SplitResult) -> bool:
    """Whether the address's port is a valid number, or missing."""
    try:
        return parts.port != 0
    except ValueError:
        return False


def read_url(url: str) -> str:
    """Return the explorer's address without a path. Raises ConfigError."""
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.netloc or not _has_port(parts):
        raise ConfigError(f"url={url!r}: give http://HOST:PORT, as in FLYWHEEL_URL=http://127.0.0.1:8010")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"
