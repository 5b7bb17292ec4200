"""Teachers of `distill`: other models, whose tokenizer must be the policy's.

A teacher in a folder is loaded next to the policy and runs before the first step. Rank 0 queries a teacher behind an
endpoint after rows are claimed and before they are trained on: while it is unavailable or slow, the rows stay leased,
and only the trainer waits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from shared.config import DistillConfig
from shared.errors import ConfigError, first_line
from shared.experience import Experience, LogprobArray
from shared.log import StageLogger
from shared.stop_request import StopRequest
from trainer_service.batch import is_demonstration
from trainer_service.disk import pauses_s
from trainer_service.errors import Stopped

log = StageLogger("teacher")
LONGEST_PAUSE_S = 30.0
_FIRST_PAUSE_S = 0.5
_ASKED_AT_ONCE = 4096  # token ids of one request that compares tokenizers
_REFUSED = (400, 413, 422)  # statuses of a request that would be refused again
# At start, wrong settings cause these; later, a server that restarts may send them too, and is waited for.
_DENIED = (401, 403)
_MISSING = 404
_FAILED = 500
_MOST_FAILURES = 5  # at one request before it is compared with a harmless one
_HARMLESS = [0, 1]  # token ids
_IMPOSSIBLE = -9999.0  # what vLLM sends in place of minus infinity, which JSON does not have


class _Unavailable(Exception):
    """The teacher is unavailable, too slow, or sends an invalid response; the request is repeated."""


class _Failed(_Unavailable):
    """An error of the server; perhaps one that this request makes each time."""


class _Refused(Exception):
    """The teacher refuses this request; repeating it would not help."""


class _Denied(_Refused):
    """The teacher refuses this key."""


def load_tokenizer(folder: str | Path, key: str) -> Any:
    """Load a model folder's tokenizer. Raises ConfigError that names the key."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"{key}={folder} has no tokenizer that can be loaded ({first_line(exc)}); name a model folder"
        ) from exc


def require_same_vocabulary(tokenizer: Any, config: DistillConfig) -> None:
    """Raise ConfigError unless the teacher's folder has the model's tokenizer."""
    own, other = tokenizer.get_vocab(), load_tokenizer(str(config.path), "trainer.distill.path").get_vocab()
    if own != other:
        raise _another_tokenizer("path", config.path, f"{len(own.items() ^ other.items())} entries differ")


class RemoteTeacher:
    """A teacher behind an OpenAI endpoint that returns `prompt_logprobs`, as vLLM does."""

    def __init__(self, config: DistillConfig, stop: StopRequest) -> None:
        """Raises ConfigError if the environment variable of the key holds none."""
        headers = {"Authorization": f"Bearer {_key(config.key_env)}"} if config.key_env else {}
        self._config, self._stop = config, stop
        self._client = httpx.Client(base_url=str(config.url).rstrip("/"), headers=headers, timeout=config.timeout_s)
        self._model = config.model
        self._lock = threading.Lock()
        self._is_away = False
        self._starts = False  # before the first training, when a denied request means wrong settings

    def require_same_tokenizer(self, tokenizer: Any) -> None:
        """Wait for the teacher, and compare its tokens with the model's. Raises ConfigError and Stopped.

        Both decode every token id, in long rows: a difference in any token appears there.
        """
        url, count, self._starts = self._config.url, len(tokenizer), True
        try:
            if self._model is None:
                self._model = str(self._ask("GET", "/v1/models")["data"][0]["id"])
            for first in range(0, count, _ASKED_AT_ONCE):
                ids = list(range(first, min(first + _ASKED_AT_ONCE, count)))
                text = str(self._ask("POST", "/detokenize", {"model": self._model, "tokens": ids})["prompt"])
                if text.split() != tokenizer.decode(ids).split():
                    raise _another_tokenizer("url", url, f"a token from {ids[0]} to {ids[-1]} is another text")
            self._logprobs(_HARMLESS)
            self._starts = False
        except _Denied as exc:
            raise ConfigError(
                f"trainer.distill.url={url} cannot be a teacher ({exc}); name in trainer.distill.key_env the variable "
                "with a key that it takes"
            ) from exc
        except (_Refused, KeyError, IndexError, TypeError) as exc:
            raise ConfigError(
                f"trainer.distill.url={url} cannot be a teacher ({exc}); name a vLLM server of the model's own family, "
                "without /v1, and one of its models in trainer.distill.model"
            ) from exc

    def teach(self, rows: Sequence[Experience]) -> list[Experience]:
        """Add the teacher's logprobs of the replies to the rows, or the reason why it returned none. Raises Stopped.

        Rehearsed rows stay as they are: their replies are not learned from again. So do demonstrations: nobody sampled
        them.
        """
        with ThreadPoolExecutor(self._config.requests_in_flight) as pool:
            return list(pool.map(self._teach, rows))

    def _teach(self, row: Experience) -> Experience:
        if row.is_rehearsal or is_demonstration(row):
            return row
        ids = [*row.tokens.prompt_ids.tolist(), *row.tokens.reply_ids.tolist()]
        try:
            logprobs = self._logprobs(ids)[-len(row.tokens.reply_ids) :]
            if not (np.isfinite(logprobs) & (logprobs > _IMPOSSIBLE)).all():
                raise _Refused("a token of the reply is impossible to it")
        except _Refused:
            return replace(row, unused=(*row.unused, "teacher_refused"))
        return replace(row, teacher=logprobs)

    def _logprobs(self, ids: list[int]) -> LogprobArray:
        """Return log p of each token after the first, at temperature 1. Raises _Refused and Stopped."""
        answer = self._ask("POST", "/v1/completions", self._scoring(ids))
        try:
            entries = answer["choices"][0]["prompt_logprobs"][1:]
            found = [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries, strict=True)]
            logprobs = np.array(found, np.float32)
        except (KeyError, IndexError, TypeError, ValueError) as exc:
            raise _Refused("it gives no prompt_logprobs") from exc
        if np.isnan(logprobs).any():
            raise _Refused("a logprob is no number")
        return logprobs

    def _scoring(self, ids: list[int]) -> dict[str, Any]:
        return {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request until it is answered. Raises _Refused and Stopped."""
        pauses, failures = pauses_s(_FIRST_PAUSE_S), 0
        while not self._stop:
            try:
                answer = self._try(method, path, body)
            except _Unavailable as exc:
                failures += isinstance(exc, _Failed)
                if failures >= _MOST_FAILURES and self._answers_others():
                    raise _Refused(f"{exc}, repeatedly, while other requests succeed") from exc
                self._log_availability(away=True, reason=str(exc))
                self._stop.wait(min(next(pauses), LONGEST_PAUSE_S))
                continue
            self._log_availability(away=False)
            return answer
        raise Stopped

    def _answers_others(self) -> bool:
        try:
            self._try("POST", "/v1/completions", self._scoring(_HARMLESS))
        except (_Unavailable, _Refused):
            return False
        return True

    def _try(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            reply = self._client.request(method, path, json=body)
            if reply.is_success:
                return reply.json()
        except (httpx.HTTPError, ValueError) as exc:
            raise _Unavailable(f"{type(exc).__name__}: {exc}") from exc
        message = f"status {reply.status_code} for {path}"
        if self._starts and reply.status_code in _DENIED:
            raise _Denied(message)
        if reply.status_code == _FAILED:
            raise _Failed(message)
        refused = (*_REFUSED, _MISSING) if self._starts else _REFUSED
        raise _Refused(message) if reply.status_code in refused else _Unavailable(message)

    def _log_availability(self, *, away: bool, reason: str = "") -> None:
        """Log once that the teacher is unavailable, and once that it is available again."""
        with self._lock:
            if away and not self._is_away:
                log.warning("the teacher is away or slow; waiting", url=self._config.url, reason=reason)
            elif self._is_away and not away:
                log.info("the teacher answers again", url=self._config.url)
            self._is_away = away


def _key(variable: str) -> str:
    """Return the key in a variable, without the line's end that a file of secrets may add. Raises ConfigError."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"trainer.distill.key_env={variable}: the variable is not set; set it to the key")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"trainer.distill.key_env={variable}: the variable holds characters that no header may have; set it to the "
            "key"
        )
    return key


def _another_tokenizer(key: str, value: object, how: str) -> ConfigError:
    return ConfigError(
        f"trainer.distill.{key}={value}: its tokenizer is not the model's ({how}); name a teacher of the model's own "
        "family, whose tokens have the same ids"
    )
