"""Reload: versions come into service only when the engine proves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shared.ledger import transitions
from shared.ledger.queries import list_versions
from tests.scripted_engine import ScriptedEngine
from tests.servers import RunningExplorer, wait_until, write_scripted_version


def publish(explorer: RunningExplorer, version: int, logprob: float = -1.0) -> Path:
    folder = write_scripted_version(explorer.config.root, version, logprob)
    with explorer.ledger.write() as connection:
        parent = version - 1 if version else None
        transitions.publish(connection, version=version, parent=parent, kind="full", step=version)
    return folder


def version_states(explorer: RunningExplorer) -> dict[int, str]:
    with explorer.ledger.read() as connection:
        return {row.version: row.state for row in list_versions(connection)}


def served(explorer: RunningExplorer) -> str:
    return explorer.chat().headers["X-Flywheel-Version"]


def test_a_published_version_comes_into_service_without_a_restart(explorer, scripted_engine):
    publish(explorer, 1, -1.5)
    wait_until(lambda: served(explorer) == "1")
    calls = scripted_engine.script.calls
    start = calls.index("/pause")
    assert calls[start : start + 4] == ["/pause", "reload v000001", "/reset_prefix_cache", "/resume"]
    assert version_states(explorer) == {1: "SERVING"}
    assert explorer.chat(model="agent@1").status_code == 200


def test_a_version_whose_probe_the_engine_does_not_reproduce_is_rejected_and_the_last_good_one_goes_back(
    explorer, scripted_engine
):
    publish(explorer, 1, -1.5)
    wait_until(lambda: served(explorer) == "1")
    scripted_engine.script.wrong_probe_for = {"v000002"}
    publish(explorer, 2, -2.5)
    wait_until(lambda: version_states(explorer).get(2) == "REJECTED")
    wait_until(lambda: served(explorer) == "1")
    assert scripted_engine.script.loaded == "v000001"
    assert not scripted_engine.script.paused
    publish(explorer, 3, -3.5)
    wait_until(lambda: served(explorer) == "3")


def test_a_damaged_version_folder_never_reaches_an_engine(explorer, scripted_engine):
    publish(explorer, 1)
    wait_until(lambda: served(explorer) == "1")
    folder = write_scripted_version(explorer.config.root, 2, -2.0)
    (folder / "model.safetensors").write_bytes(b"weights of X")
    with explorer.ledger.write() as connection:
        transitions.publish(connection, version=2, parent=1, kind="full", step=2)
    wait_until(lambda: version_states(explorer).get(2) == "REJECTED")
    assert "reload v000002" not in scripted_engine.script.calls
    assert served(explorer) == "1"


def test_an_explorer_that_starts_anew_finds_what_the_engine_serves(explorer, scripted_engine, start_explorer):
    publish(explorer, 1)
    wait_until(lambda: served(explorer) == "1")
    explorer.stop()
    calls = len(scripted_engine.script.calls)
    scripted_engine.script.paused = True  # the other one died within a reload
    again = start_explorer([scripted_engine.url]).wait_ready()
    assert served(again) == "1"
    assert scripted_engine.script.calls[calls:] == ["/resume"]
    assert not scripted_engine.script.paused


def test_several_engines_reload_one_at_a_time_while_the_others_serve(
    scripted_engine: ScriptedEngine, start_explorer: Callable[..., RunningExplorer]
):
    second = ScriptedEngine()
    try:
        explorer = start_explorer([scripted_engine.url, second.url]).wait_ready()
        publish(explorer, 1)
        wait_until(lambda: [e.version for e in explorer.app.state.deps.pool.serving] == [1, 1])
        assert version_states(explorer) == {1: "SERVING"}
    finally:
        second.stop()


def test_rows_name_the_versions_that_sampled_their_first_and_last_token(explorer, scripted_engine):
    scripted_engine.script.gap_s = 0.6  # longer than the engine may drain
    with explorer.http.stream("POST", "/chat", json={"messages": [], "stream": True}) as reply:
        events = reply.iter_lines()
        next(events)
        publish(explorer, 1)
        for _ in events:
            pass
    with explorer.ledger.read() as connection:
        row = connection.exec_driver_sql("SELECT version, version_end FROM experiences").one()
    assert tuple(row) == (0, 1)
