"""How a run of tests is divided: between the short form's databases, and among workers."""

from __future__ import annotations

import pytest

from tests.support.forms import FULL, one_database
from tests.support.processes import REPOSITORY
from tests.support.scheduling import LONGEST, scope_of


@one_database
@pytest.mark.parametrize("case", range(4))
def test_in_the_short_form_cases_take_the_databases_in_turn(case, database_url, request):
    same = [item for item in request.session.items if getattr(item, "function", None) is request.function]
    assert len({item.callspec.params["case"] for item in same}) * (2 if FULL else 1) == len(same)
    assert FULL or (database_url is None) == (case % 2 == 0)


@pytest.mark.parametrize(
    ("file", "scope"),
    [
        ("test_1_loop", "e2e live"),
        ("test_5_agent_wheel", "e2e live"),
        ("test_9_kill", "e2e live"),
        ("test_4_frameworks", "e2e tools_live"),
        ("test_5_agent_sdk", "e2e tools_live"),
        ("test_7_examples", "e2e tools_live"),
        ("test_6_adapters", "tests/e2e/test_6_adapters.py"),
    ],
)
def test_one_worker_runs_the_tests_that_share_a_service(file, scope):
    assert scope_of(f"tests/e2e/{file}.py") == scope


def test_what_is_begun_first_exists():
    scopes = {scope_of(str(file.relative_to(REPOSITORY))) for file in (REPOSITORY / "tests").glob("**/test_*.py")}
    assert set(LONGEST) <= scopes
