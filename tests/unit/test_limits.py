"""Limits of a key, by a clock of our own."""

from __future__ import annotations

import pytest

from explorer_service.api.errors import ApiError
from explorer_service.api.limits import Limit


def test_requests_a_minute_fill_up_again():
    now = [0.0]
    limit = Limit(60, None, clock=lambda: now[0])
    for _ in range(60):
        with limit.taken():
            pass
    with pytest.raises(ApiError) as refused, limit.taken():
        pass
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    now[0] = 2.0
    for _ in range(2):
        with limit.taken():
            pass
    with pytest.raises(ApiError), limit.taken():
        pass


def test_a_limit_below_one_request_a_minute_lets_one_pass_in_its_time():
    now = [0.0]
    limit = Limit(0.5, None, clock=lambda: now[0])
    for now[0] in (0.0, 120.0):
        with limit.taken():
            pass
        with pytest.raises(ApiError) as refused, limit.taken():
            pass
        assert refused.value.retry_after_s == 120


def test_requests_at_once_give_their_place_back():
    limit = Limit(None, 1)
    with limit.taken(), pytest.raises(ApiError), limit.taken():
        pass
    with limit.taken():
        assert limit.in_flight == 1
    assert limit.in_flight == 0


def test_without_limits_everyone_passes():
    limit = Limit(None, None)
    with limit.taken(), limit.taken():
        assert limit.in_flight == 2
