"""Each example, short, on one server that runs and whose model is no example's. Several run at a time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Live
from tests.e2e.test_7_examples import EXAMPLES, play
from tests.e2e.test_7_shop_and_shadow import shadow

AT_ONCE = 4

pytestmark = pytest.mark.engine


def run_short(name: str, url: str, root: Path) -> dict[str, Any]:
    """An example's figures: of half a minute of learning, or of 12 seconds of the shadow."""
    if name == "shadow":
        return shadow(root, "--url", url, "--minutes", "0.2", limit_s=400)
    return play(name, root, "--url", url, "--minutes", "0.5", "--held-out", "4", limit_s=400)


@pytest.fixture(scope="module")
def figures(
    tools_live: Live, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[str, Future[dict[str, Any]]]]:
    """The examples that this session's tests ask for, by name: started here, in the tests' order."""
    here = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in here if isinstance(item, pytest.Function)]
    root, url = tmp_path_factory.mktemp("examples"), str(tools_live.http.base_url)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(run_short, name, url, root / name) for name in names}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_evaluates_learns_and_reports_on_a_server_that_runs(name, figures):
    found = figures[name].result()
    assert found["after"]["version"] >= found["before"]["version"] + 2
    assert found["before"]["failed"] == found["after"]["failed"] == 0
    assert found["runs"] > 8


@pytest.mark.parametrize("name", ["shadow"])
def test_production_is_untouched_by_a_shadow_that_can_do_nothing(name, figures):
    assert figures[name].result()["production_calls"] > 10
