"""Versions that wait until requests of others have ended: for a place in the engine, or to be computed at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
from sqlalchemy import func, select

from explorer_service.engines.engine import EngineState
from explorer_service.errors import EngineTimeout
from shared.ledger.tables import load_failures
from tests.support.adapters import engine, publish_and_wait, said, state
from tests.support.script import Script
from tests.support.scripted_adapters import name_of, publish_adapter, publish_row, write_adapter
from tests.support.servers import RunningExplorer, served, wait_until

PROBES = "/v1/completions"


def limit_proofs(explorer: RunningExplorer, script: Script, seconds: float = 0.3) -> list[str]:
    """Limit the time of a proof while the engine does not answer it. Returns the models of those that timed out."""
    admin, late = explorer.deps.dispatcher._health_checks["e0"].__self__, []
    score = admin.score

    async def limited(sequences: list[list[int]], model: str | None = None) -> list[list[float]]:
        before, is_hung = admin._timeout_s, PROBES in script.hung
        admin._timeout_s = seconds if is_hung else before
        try:
            return await score(sequences, model)
        finally:
            admin._timeout_s = before
            late.extend([model or "agent"] if is_hung else [])

    admin.score = limited
    return late


@contextmanager
def streams(explorer: RunningExplorer, script: Script, *models: str) -> Iterator[list[httpx.Response]]:
    """Streams of these models, which end with the block."""
    script.streams_wait = True
    with ExitStack() as stack:
        asked = [{"messages": [], "stream": True, "model": model} for model in models]
        opened = [explorer.http.stream("POST", "/chat", json=one) for one in asked]
        replies = [stack.enter_context(stream) for stream in opened]
        yield replies
        script.streams_wait = False
        assert all(reply.read().endswith(b"data: [DONE]\n\n") for reply in replies)


def failures(explorer: RunningExplorer) -> int:
    with explorer.ledger.read() as connection:
        return connection.execute(select(func.count()).select_from(load_failures)).scalar_one()


def test_a_version_whose_proof_waits_behind_requests_of_others_is_not_blamed_and_stays(start, scripted_engine):
    explorer, script = start(retry_s=2.0), scripted_engine.script
    late = limit_proofs(explorer, script)
    publish_and_wait(explorer, 1, 2)
    with streams(explorer, script, "agent@1", "agent@2"):
        script.hung.add(PROBES)
        name = publish_adapter(explorer, 3)
        wait_until(lambda: late.count(name) > 1)
        assert (script.calls.count(f"load {name}"), script.calls.count(f"unload {name}")) == (1, 0)
        assert (state(explorer, 3), failures(explorer)) == ("PUBLISHED", 0)
        assert engine(explorer).state is EngineState.DEGRADED
        assert "engine.max_loras" in engine(explorer).reason
        assert said(explorer.chat()) == "v000002"
    script.hung.clear()
    wait_until(lambda: served(explorer) == "3")


def test_who_names_a_version_whose_proof_waits_behind_requests_of_others_waits(explorer, scripted_engine):
    script = scripted_engine.script
    publish_and_wait(explorer, 1, 2)
    wait_until(lambda: [name[:7] for name in script.adapters] == ["agent@2"])
    late = limit_proofs(explorer, script)
    script.hung.add(PROBES)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(explorer.chat, model="agent@1")
        wait_until(lambda: len(late) > 1)
        assert not (reply.done() or failures(explorer))
        script.hung.clear()
        assert said(reply.result()) == "v000001"


def test_a_version_is_not_judged_while_the_one_before_it_cannot_be_proven_again(explorer, scripted_engine):
    """A wrong proof of the new version could be the fault of an engine that computes all of them wrongly."""
    script, admin = scripted_engine.script, explorer.deps.dispatcher._health_checks["e0"].__self__
    before = publish_adapter(explorer, 1)
    wait_until(lambda: served(explorer) == "1")
    score, late, ended = admin.score, [], threading.Event()

    async def busy(sequences: list[list[int]], model: str | None = None) -> list[list[float]]:
        if model == before and not ended.is_set():
            late.append(model)
            raise EngineTimeout("it has not answered")
        return await score(sequences, model)

    admin.score = busy
    write_adapter(explorer.config.root, 2)
    script.wrong_probe_for.add(name_of(explorer, 2))
    publish_row(explorer, 2)
    wait_until(lambda: len(late) > 1)
    assert (state(explorer, 2), engine(explorer).is_open, served(explorer)) == ("PUBLISHED", True, "1")
    ended.set()
    wait_until(lambda: state(explorer, 2) == "REJECTED")
    assert served(explorer) == "1"


def test_an_engine_that_changes_owners_while_no_proof_is_answered_serves_on_what_it_served(start, scripted_engine):
    script, both = scripted_engine.script, [start(), start()]
    owner, other = sorted(both, key=lambda one: not one.deps.leases.holds(scripted_engine.url))
    publish_and_wait(owner, 1, 2)
    assert said(owner.chat(model="agent@1")) == "v000001"
    wait_until(lambda: served(other) == "2" and 1 in engine(other).versions)
    late = limit_proofs(other, script)
    script.hung.add(PROBES)
    owner.stop()
    wait_until(lambda: len(late) > 3)
    assert [said(other.chat(model=model)) for model in ("agent", "agent@1")] == ["v000002", "v000001"]
    script.hung.clear()
    wait_until(lambda: other.deps.leases.has_told(scripted_engine.url, "serving", 2))
    assert [said(other.chat(model=model)) for model in ("agent", "agent@1")] == ["v000002", "v000001"]


def test_the_newest_version_gets_the_first_place_that_becomes_free(start, scripted_engine):
    explorer, script = start(room=1, retry_s=600.0), scripted_engine.script
    publish_and_wait(explorer, 1)
    with ExitStack() as opened:
        for version in (1, 2, 3):
            opened.enter_context(streams(explorer, script, f"agent@{version}"))
            if version < 3:
                publish_and_wait(explorer, version + 1)
        publish_adapter(explorer, 4)
        wait_until(lambda: engine(explorer).state is EngineState.DEGRADED)
        assert "holds 3 versions, all of which have requests" in engine(explorer).reason
    wait_until(lambda: served(explorer) == "4")
