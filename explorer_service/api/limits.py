"""The limits of a key: requests per minute, and requests in flight. Each process counts its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from explorer_service.api.errors import ApiError


class Limit:
    """A token bucket of one minute's requests, at least one, and a count of requests in flight."""

    def __init__(
        self, per_minute: float | None, at_once: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_minute = per_minute
        self._at_once = at_once
        self._clock = clock
        self._tokens = self._most_tokens = max(1.0, per_minute or 0.0)
        self._filled_at = clock()
        self.in_flight = 0

    def taken(self) -> Limit:
        """`with limit.taken():` counts one request. Raises ApiError 429 with Retry-After."""
        return self

    def __enter__(self) -> None:
        if self._at_once is not None and self.in_flight >= self._at_once:
            raise _too_many(f"this key has {self.in_flight} requests in flight, which is its limit", 1)
        self._take_token()
        self.in_flight += 1

    def __exit__(self, *_: object) -> None:
        self.in_flight -= 1

    def _take_token(self) -> None:
        if self._per_minute is None:
            return
        now, per_s = self._clock(), self._per_minute / 60
        self._tokens = min(self._most_tokens, self._tokens + (now - self._filled_at) * per_s)
        self._filled_at = now
        if self._tokens < 1:
            wait_s = math.ceil((1 - self._tokens) / per_s)
            raise _too_many(f"this key has a limit of {self._per_minute:g} requests per minute", wait_s)
        self._tokens -= 1


def _too_many(message: str, retry_after_s: int) -> ApiError:
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after_s=retry_after_s)
