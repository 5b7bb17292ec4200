"""What a caller says is not taken for what the engine has lost."""

from __future__ import annotations

import pytest
from aiohttp import web

from tests.support.adapters import engine, publish_and_wait
from tests.support.scripted_adapters import name_of
from tests.support.scripted_engine import ScriptedEngine


class Echoing(ScriptedEngine):
    """Answers 404 with the caller's text, as vLLM's responses do."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    @web.middleware
    async def _meet_faults(self, request, handler):
        if request.path != "/v1/responses":
            return await super()._meet_faults(request, handler)
        self.asked += 1
        message = f"Response with id '{(await request.json())['previous_response_id']}' not found."
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
