"""Shares: names are divided among versions by weight, and few of them move when shares change."""

from __future__ import annotations

from collections import Counter

from explorer_service.traffic.shares import draw

NAMES = [f"chatcmpl-{number:024x}" for number in range(20_000)]


def test_each_version_gets_its_share():
    counted = Counter(draw({1: 0.6, 2: 0.3, 3: 0.1}, name) for name in NAMES)
    for version, share in {1: 0.6, 2: 0.3, 3: 0.1}.items():
        deviation = (share * (1 - share) / len(NAMES)) ** 0.5
        assert abs(counted[version] / len(NAMES) - share) < 4 * deviation


def test_when_a_share_grows_names_move_only_to_it_and_no_more_than_have_to():
    moved = Counter((draw({1: 0.9, 2: 0.1}, name), draw({1: 0.7, 2: 0.3}, name)) for name in NAMES)
    assert moved[2, 1] == 0
    assert 0.18 < moved[1, 2] / len(NAMES) < 0.22


def test_when_a_version_leaves_only_its_names_move():
    for name in NAMES[:2000]:
        before, after = draw({1: 0.5, 2: 0.3, 3: 0.2}, name), draw({1: 0.5, 2: 0.3}, name)
        assert after == before or before == 3


def test_without_shares_none_is_chosen_and_one_alone_gets_all():
    assert draw({}, "a name") is None
    assert {draw({7: 0.2}, name) for name in NAMES[:100]} == {7}


def test_a_name_may_contain_anything_that_a_caller_sends():
    assert draw({1: 0.5, 2: 0.5}, "\ud800\0 café") in (1, 2)
