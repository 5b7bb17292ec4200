"""Routes that are not recorded: the named version answers, and a caller's words are not taken for the engine's."""

from __future__ import annotations

import re

import pytest
from aiohttp import web

from tests.support.adapters import engine, publish_and_wait
from tests.support.scripted_adapters import name_of
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, wait_until

UNRECORDED = ["/v1/responses", "/v1/messages", "/tokenize", "/detokenize"]


class Echoing(ScriptedEngine):
    """Answers unrecorded routes with the model's name, or 404 with the caller's text, as vLLM's responses do."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.note = lambda: None  # called at each such request

    @web.middleware
    async def _meet_faults(self, request, handler):
        if request.path not in UNRECORDED:
            return await super()._meet_faults(request, handler)
        self.asked += 1
        self.note()
        body = await request.json()
        if "previous_response_id" not in body:
            return web.json_response({"asked": body["model"]})
        message = f"Response with id '{body['previous_response_id']}' not found."
        return web.json_response({"error": {"message": message, "code": 404}}, status=404)


@pytest.fixture
def scripted_engine():
    made = Echoing()
    yield made
    made.stop()


@pytest.mark.parametrize("version", [0, 1])
def test_a_404_that_repeats_a_name_of_the_caller_s_is_the_caller_s_answer(explorer, scripted_engine, version):
    publish_and_wait(explorer, 1)
    name = f"resp_{name_of(explorer, 1) if version else 'agent'}"
    asked = {"model": f"agent@{version}", "input": "hi", "previous_response_id": name}
    reply = explorer.http.post("/v1/responses", json=asked)
    assert (reply.status_code, scripted_engine.asked, engine(explorer).is_open) == (404, 1, True)


@pytest.mark.parametrize("seed", [{}, {"seed": 7}])
@pytest.mark.parametrize("path", UNRECORDED)
def test_an_unrecorded_route_is_answered_by_the_version_that_the_caller_names_or_the_newest(explorer, path, seed):
    publish_and_wait(explorer, 1, 2)
    for model, version in (("agent", 2), ("agent@0", 0), ("agent@1", 1), ("agent@2", 2)):
        reply = explorer.http.post(path, json={"model": model, "input": "hi", **seed})
        name = name_of(explorer, version) if version else "agent"
        assert (reply.headers["X-Flywheel-Version"], reply.json()["asked"]) == (str(version), name), model


def test_unrecorded_requests_that_sample_are_divided_among_the_versions_with_shares_and_others_are_not(explorer):
    publish_and_wait(explorer, 1, 2)
    assert explorer.http.put("/traffic", json={"weights": {"1": 0.5, "2": 0.5}}).status_code == 200
    wait_until(lambda: explorer.deps.shares.divided and {1, 2} <= set(engine(explorer).versions))
    answered = {path: {version_of(explorer, path, "agent") for _ in range(60)} for path in UNRECORDED}
    assert [len(answered[path]) for path in UNRECORDED] == [2, 2, 1, 1]
    assert answered["/v1/responses"] == answered["/v1/messages"] == {"1", "2"}
    assert {version_of(explorer, "/v1/responses", "agent@1") for _ in range(20)} == {"1"}


def version_of(explorer: RunningExplorer, path: str, model: str) -> str:
    """The version that answers a request to an unrecorded route."""
    return explorer.http.post(path, json={"model": model, "input": "hi"}).headers["X-Flywheel-Version"]


def test_unrecorded_requests_are_no_chats_in_the_metrics(explorer, scripted_engine):
    metric = re.compile(r"^flywheel_chat_(engine_seconds_count|in_flight_requests) (\S+)$", re.MULTILINE)
    metrics, in_flight = explorer.deps.metrics, []
    scripted_engine.note = lambda: in_flight.append(dict(metric.findall(metrics.render().decode())))
    assert explorer.chat().status_code == 200
    for path in UNRECORDED:
        assert explorer.http.post(path, json={"model": "agent", "input": "hi"}).status_code == 200
    assert in_flight == 4 * [{"engine_seconds_count": "1.0", "in_flight_requests": "0.0"}]
    assert dict(metric.findall(metrics.render().decode())) == in_flight[0]


def test_an_unrecorded_request_with_a_seed_counts_as_one_while_it_is_in_flight(explorer, scripted_engine):
    seen = []
    scripted_engine.note = lambda: seen.append(engine(explorer).seeded_in_flight)
    for body in ({"seed": 7}, {"seed": None}, {}):
        explorer.http.post("/v1/responses", json={"model": "agent", "input": "hi", **body})
    assert (seen, engine(explorer).seeded_in_flight) == ([1, 0, 0], 0)
