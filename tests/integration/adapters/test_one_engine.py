"""Versions that are adapters: many side by side on one engine, each under a name of its own."""

from __future__ import annotations

from typing import Any

import pytest

from explorer_service.engines.engine import EngineState
from services.engine.stage import Stage
from shared.ledger.queries import leased_versions, list_versions
from tests.support.adapters import engine, publish_and_wait, said, state, watch_openings
from tests.support.scripted_adapters import name_of, publish_adapter, publish_row, write_adapter
from tests.support.servers import served, wait_until

# ------------------------------------------------------------------ what is served, and under which name


def test_a_published_adapter_comes_into_service_under_a_name_of_its_own_and_nothing_is_paused(
    explorer, scripted_engine
):
    assert served(explorer) == "0"
    name = publish_adapter(explorer, 1)
    wait_until(lambda: served(explorer) == "1")
    assert said(explorer.chat()) == "v000001"
    assert scripted_engine.script.bodies[-1]["model"] == name
    assert {call for call in scripted_engine.script.calls if not call.startswith("load")} <= {"/resume"}
    assert state(explorer, 1) == "SERVING"


def test_replies_and_streams_show_the_name_that_the_caller_asked_for(explorer):
    publish_and_wait(explorer, 1)
    for asked, shown in (({}, "agent"), ({"model": "agent"}, "agent"), ({"model": "agent@1"}, "agent@1")):
        assert explorer.chat(**asked).json()["model"] == shown
        events = explorer.chat(stream=True, **asked).text
        assert f'"model": "{shown}"' in events
        assert "agent@1+" not in events
    names = [card["id"] for card in explorer.http.get("/v1/models").json()["data"]]
    assert names == ["agent", "agent@0", "agent@1"]


def test_the_base_answers_under_its_own_name_who_pins_version_0(explorer, scripted_engine):
    publish_and_wait(explorer, 1)
    reply = explorer.chat(model="agent@0")
    assert (reply.headers["X-Flywheel-Version"], said(reply), reply.json()["model"]) == ("0", "v000000", "agent@0")
    assert scripted_engine.script.bodies[-1]["model"] == "agent"


def test_no_name_and_no_path_is_ever_loaded_for_two_contents(explorer, scripted_engine):
    publish_and_wait(explorer, 1, 2, 3)
    explorer.chat(model="agent@1")
    explorer.chat(model="agent@2")
    loaded = set(scripted_engine.script.ever_loaded)
    assert len({name for name, _ in loaded}) == len({path for _, path in loaded}) == len(loaded) == 3


# ------------------------------------------------------------------ restarts


def test_an_engine_that_restarts_gets_its_set_back_before_it_takes_chats(explorer, scripted_engine):
    publish_and_wait(explorer, 1, 2)
    assert explorer.chat(model="agent@1").status_code == 200
    opened_with = watch_openings(explorer)
    scripted_engine.die()
    wait_until(lambda: bool(opened_with))
    assert opened_with == [{0, 1, 2}]
    assert (said(explorer.chat()), said(explorer.chat(model="agent@1"))) == ("v000002", "v000001")


def test_an_engine_that_has_silently_lost_its_adapters_answers_no_chat_by_another_version(explorer, scripted_engine):
    publish_and_wait(explorer, 1)
    scripted_engine.script.adapters.clear()
    assert said(explorer.chat()) == "v000001"
    scripted_engine.script.adapters.clear()
    assert explorer.chat(stream=True).text.endswith("data: [DONE]\n\n")


def test_an_explorer_that_starts_anew_reads_what_the_engine_has_and_loads_nothing_twice(
    start, scripted_engine, explorer
):
    publish_and_wait(explorer, 1, 2)
    explorer.chat(model="agent@1")
    explorer.stop()
    loads = len(scripted_engine.script.ever_loaded)
    again = start()
    assert said(again.chat()) == "v000002"
    assert len(scripted_engine.script.ever_loaded) == loads
    wait_until(lambda: [name[:7] for name in scripted_engine.script.adapters] == ["agent@2"])


def test_what_an_owner_that_died_has_loaded_stays_staged_while_the_engine_has_it(
    start, scripted_engine, explorer, tmp_path
):
    publish_and_wait(explorer, 1, 2)
    explorer.stop()
    scripted_engine.script.stage = Stage(tmp_path, tmp_path / "staged", keep=1)
    folder = scripted_engine.script.stage.stage(1)
    scripted_engine.script.adapters.clear()
    scripted_engine.script.adapters[name_of(explorer, 1)] = str(folder)  # and died before it said so
    assert served(start()) == "2"
    wait_until(lambda: [name[:7] for name in scripted_engine.script.adapters] == ["agent@2"])
    assert scripted_engine.script.gone == []


# ------------------------------------------------------------------ what is refused


WRONG = {
    "another base": ({"base": "other"}, "was trained from another base model"),
    "another rank": ({"rank": 3}, "should be [3, 3]"),
    "another target": ({"targets": ["v_proj"]}, "of no module that adapter_config.json names"),
    "a missing tensor": (
        {"tensors": {"base_model.model.model.layers.0.q_proj.lora_A.weight": ("F32", [2, 3])}},
        "lora_B.weight' is missing",
    ),
    "a tensor of another shape": (
        {
            "tensors": {
                "base_model.model.model.layers.0.q_proj.lora_A.weight": ("F32", [2, 3]),
                "base_model.model.model.layers.0.q_proj.lora_B.weight": ("F32", [5, 2]),
            }
        },
        "should be [4, 2]",
    ),
}


@pytest.mark.parametrize("wrong, reason", WRONG.values(), ids=WRONG)
def test_an_adapter_that_does_not_fit_is_rejected_before_an_engine_sees_it_and_the_rest_serves_on(
    explorer, scripted_engine, wrong, reason
):
    publish_and_wait(explorer, 1)
    publish_adapter(explorer, 2, **wrong)
    wait_until(lambda: state(explorer, 2) == "REJECTED")
    with explorer.ledger.read() as connection:
        assert reason in str(next(row.reason for row in list_versions(connection) if row.version == 2))
    assert served(explorer) == "1"
    assert not any(call.startswith("load agent@2") for call in scripted_engine.script.calls)
    refused = explorer.chat(model="agent@2")
    assert (refused.status_code, "REJECTED" in refused.text) == (404, True)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "started without --enable-lora": (
        {"refuses_lora": "LoRA is not enabled. Use --enable-lora to enable LoRA."},
        "start it with --enable-lora",
    ),
    "started without the routes": ({"routes_lora": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    "started for a lower rank": (
        {"refuses_lora": "LoRA rank 2 is greater than max_lora_rank 1."},
        "start the engine with the model.lora.rank",
    ),
}


@pytest.mark.parametrize("fault, reason", FAULTS.values(), ids=FAULTS)
def test_an_engine_that_cannot_load_adapters_serves_the_base_says_why_and_condemns_no_version(
    explorer, scripted_engine, fault, reason
):
    for name, value in fault.items():
        setattr(scripted_engine.script, name, value)
    publish_adapter(explorer, 1)
    wait_until(lambda: engine(explorer).state is EngineState.DEGRADED)
    assert reason in engine(explorer).reason
    assert (served(explorer), state(explorer, 1)) == ("0", "PUBLISHED")
    scripted_engine.script.routes_lora, scripted_engine.script.refuses_lora = True, None
    wait_until(lambda: served(explorer) == "1")


@pytest.mark.parametrize("fault", ["wrong_probe_for", "without_effect"])
def test_an_adapter_that_is_not_proven_under_its_name_serves_nobody(explorer, scripted_engine, fault):
    publish_and_wait(explorer, 1)
    write_adapter(explorer.config.root, 2)
    setattr(scripted_engine.script, fault, {name_of(explorer, 2)})
    publish_row(explorer, 2)
    wait_until(lambda: state(explorer, 2) == "REJECTED")
    assert served(explorer) == "1"
    wait_until(lambda: [name[:7] for name in scripted_engine.script.adapters] == ["agent@1"])


def test_a_name_that_somebody_else_has_taken_is_refused_with_what_to_do_and_nobody_unloads_it(
    explorer, scripted_engine
):
    publish_and_wait(explorer, 1)
    write_adapter(explorer.config.root, 2)
    name = name_of(explorer, 2)
    scripted_engine.script.adapters[name] = "/elsewhere"
    publish_row(explorer, 2)
    wait_until(lambda: engine(explorer).state is EngineState.DEGRADED)
    assert f"has another adapter under the name {name}, of /elsewhere; unload it there" in engine(explorer).reason
    publish_and_wait(explorer, 3)
    wait_until(lambda: f"unload {name_of(explorer, 1)}" in scripted_engine.script.calls)
    assert state(explorer, 2) == "SKIPPED"
    assert f"unload {name}" not in scripted_engine.script.calls
    assert scripted_engine.script.adapters[name] == "/elsewhere"


@pytest.mark.parametrize("content", [b"{", None])
def test_no_adapter_is_blamed_for_settings_of_version_0_that_cannot_be_read(explorer, tmp_path, content, caplog):
    publish_and_wait(explorer, 1)
    file = tmp_path / "versions/v000000/generation_config.json"
    before = file.read_bytes()
    file.unlink()
    file.mkdir() if content is None else file.write_bytes(content)
    publish_adapter(explorer, 2)
    wait_until(lambda: "version is not there yet" in caplog.text)
    assert [state(explorer, version) for version in (0, 1, 2)] == ["RETIRED", "SERVING", "PUBLISHED"]
    file.rmdir() if content is None else file.unlink()
    file.write_bytes(before)
    wait_until(lambda: served(explorer) == "2")


def test_an_engine_that_lost_its_adapters_while_a_newer_one_could_not_be_loaded_gets_them_back(start, scripted_engine):
    explorer = start(retry_s=600.0)
    publish_and_wait(explorer, 1)
    write_adapter(explorer.config.root, 2)
    script, name, lost = scripted_engine.script, name_of(explorer, 2), []

    def lose() -> None:
        if not lost and is_staged(explorer, 2):
            lost.append(dict(script.adapters))
            script.adapters.clear()
            script.adapters[name] = "/somebody/else's"

    script.on_call["/v1/models"] = lose
    publish_row(explorer, 2)
    wait_until(lambda: bool(lost) and len(script.adapters) == 2)
    assert said(explorer.chat()) == "v000001"


def is_staged(explorer: Any, version: int) -> bool:
    """Whether the engine's owner has begun to."""
    with explorer.ledger.read() as connection:
        return version in leased_versions(connection, explorer.deps.leases.key(engine(explorer).url))
