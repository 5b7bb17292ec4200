"""GET /versions: in parts, because a trainer that runs for months publishes very many."""

from __future__ import annotations

import flywheel
import pytest
from sqlalchemy import insert

from shared.ledger.tables import versions

NUMBER = 2_300


@pytest.fixture
def listing(explorer):
    """An explorer whose ledger has many versions, whose files are deleted."""
    row = {"kind": "full", "state": "RETIRED", "created_at": 1.0, "deleted_at": 1.0}
    many = [{**row, "version": n, "step": n, "path": f"versions/v{n:06d}"} for n in range(NUMBER)]
    with explorer.ledger.write() as connection:
        connection.execute(insert(versions), many)
    return explorer


def test_the_newest_versions_are_listed_first_and_the_others_follow_in_parts(listing):
    found, question = [], "/versions"
    sizes = []
    while question:
        answer = listing.http.get(question).raise_for_status().json()
        part = [one["version"] for one in answer["versions"]]
        assert part == sorted(part)
        found, sizes = part + found, [*sizes, len(part)]
        question = None if answer["next"] is None else f"/versions?before={answer['next']}"
    assert found == list(range(NUMBER)) and sizes == [1000, 1000, 300]
    with flywheel.Client(str(listing.http.base_url)) as client:
        assert [version.number for version in client.versions()] == found


def test_a_few_versions_are_listed_in_one_part(explorer):
    for question in ("/versions", "/versions?before=0", f"/versions?before={2**31 - 1}"):
        assert explorer.http.get(question).json() == {"versions": [], "next": None}


@pytest.mark.parametrize("before", ["x", "-1", "", "1.5", str(2**31), str(2**63 - 1), "9" * 30, "²"])
def test_a_part_that_does_not_exist_is_refused(before, explorer):
    refused = explorer.http.get("/versions", params={"before": before})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "before")
