"""What the pages of examples take from a browser, and what not."""

from __future__ import annotations

import httpx
import pytest

from examples.shadow.people import Ratings
from examples.shadow.services import serve

OTHERS = [{"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://other.example"}, {"Host": "other.example"}]


@pytest.mark.parametrize("headers", OTHERS, ids=str)
def test_a_page_of_another_site_rates_nothing(headers):
    ratings = Ratings()
    with serve(ratings.answer) as url:
        assert (
            httpx.post(f"{url}/rate", data={"item": "0", "rating": "up"}, headers=headers, timeout=60).status_code
            == 403
        )
        own = {"Origin": url, "Sec-Fetch-Site": "same-origin"}
        assert httpx.post(f"{url}/rate", data={"item": "0", "rating": "up"}, headers=own, timeout=60).status_code == 200


@pytest.mark.parametrize("item", ["9" * 5000, "-1", "²", "x"])
def test_a_number_that_is_none_is_refused(item):
    with serve(Ratings().answer) as url:
        assert httpx.post(f"{url}/rate", data={"item": item, "rating": "up"}, timeout=60).status_code == 400
