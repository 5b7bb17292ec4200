"""What the pages of examples take from a browser, and what not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from examples.shadow.people import Ratings
from examples.shadow.services import serve
from examples.webshop import site
from examples.webshop.world import Shop

OTHERS = [{"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://other.example"}, {"Host": "other.example"}]


@pytest.mark.parametrize("headers", OTHERS, ids=str)
def test_a_page_of_another_site_rates_nothing(headers):
    ratings, asked = Ratings(), []

    def answer(*request: Any) -> tuple[int, str, str]:
        asked.append(request)
        return ratings.answer(*request)

    with serve(answer) as url:
        assert post(f"{url}/rate", headers, item="0", rating="up") == 403
        assert post(f"{url}/rate", {"Origin": url, "Sec-Fetch-Site": "same-origin"}, item="0", rating="up") == 200
    assert len(asked) == 1, "the page's own"


@pytest.mark.parametrize("headers", OTHERS, ids=str)
def test_a_page_of_another_site_acts_in_no_shop(headers):
    shop = Shop()
    with site.serve(shop) as url:
        assert post(f"{url}/s/0", headers, action="search[red]") == 403
        assert post(f"{url}/s/1", {"Origin": url, "Sec-Fetch-Site": "same-origin"}, action="search[red]") == 303
    assert list(shop.sessions) == ["1"], "the page's own"


def post(url: str, headers: Mapping[str, str], **form: str) -> int:
    """Send a form. Returns the answer's status."""
    return httpx.post(url, data=form, headers=headers, timeout=60).status_code


@pytest.mark.parametrize("item", ["9" * 5000, "-1", "²", "x"])
def test_a_number_that_is_none_is_refused(item):
    with serve(Ratings().answer) as url:
        assert httpx.post(f"{url}/rate", data={"item": item, "rating": "up"}, timeout=60).status_code == 400
