"""Versions that are adapters, with two explorers on one engine."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
from sqlalchemy import select, update

from explorer_service.reload import adapter_controller
from shared.experience import Purpose
from shared.ledger import queries, transitions
from shared.ledger.connect import database_time
from shared.ledger.tables import version_leases
from tests.support.adapters import engine, publish_and_wait, said
from tests.support.scripted_adapters import name_of, publish_adapter
from tests.support.servers import RunningExplorer, served, wait_until


def test_a_pin_at_the_explorer_that_does_not_own_the_engine_is_loaded_by_the_one_that_does(start, scripted_engine):
    both = [start(), start()]
    publish_and_wait(both[0], 1, 2)
    wait_until(lambda: served(both[1]) == "2")
    wait_until(lambda: [name[:7] for name in scripted_engine.script.adapters] == ["agent@2"])
    loads = len(scripted_engine.script.ever_loaded)
    assert [said(explorer.chat(model="agent@1")) for explorer in reversed(both)] == ["v000001"] * 2
    assert len(scripted_engine.script.ever_loaded) == loads + 1


def test_an_adapter_is_unloaded_only_when_no_explorer_has_a_request_of_it(start, scripted_engine):
    both = [start(), start()]
    publish_and_wait(both[0], 1)
    for explorer in both:
        wait_until(lambda explorer=explorer: served(explorer) == "1")
    scripted_engine.script.streams_wait = True
    streams = [explorer.http.stream("POST", "/chat", json={"messages": [], "stream": True}) for explorer in both]
    replies = [stream.__enter__() for stream in streams]
    publish_adapter(both[0], 2)
    wait_until(lambda: all(set(engine(explorer).versions) == {0, 2} for explorer in both))
    assert any(name.startswith("agent@1") for name in scripted_engine.script.adapters)
    scripted_engine.script.streams_wait = False
    assert all(reply.read().endswith(b"data: [DONE]\n\n") for reply in replies)
    wait_until(lambda: [name[:7] for name in scripted_engine.script.adapters] == ["agent@2"])
    for stream in streams:
        stream.__exit__(None, None, None)


def test_who_inherits_a_full_engine_serves_on_what_it_serves_and_makes_room(start, scripted_engine, tmp_path):
    script = scripted_engine.script
    explorers = [start(room=2) for _ in range(3)]
    owner, *others = explorers
    publish_and_wait(owner, 1, 2, 3)
    for explorer in explorers:
        wait_until(lambda explorer=explorer: served(explorer) == "3")
    assert [said(others[0].chat(model=f"agent@{pin}")) for pin in (1, 2)] == ["v000001", "v000002"]
    script.hung.add("/v1/load_lora_adapter")
    publish_adapter(owner, 4)
    wait_until(lambda: leased(owner, 4))
    publish_adapter(owner, 5)
    script.adapters[name_of(owner, 4)] = str(tmp_path / "versions" / "v000004")  # the engine loads on
    owner.stop()
    script.hung.clear()
    answers: set[str] = set()

    def all_serve_the_newest() -> bool:
        answers.update(said(explorer.chat()) for explorer in others)
        return all(served(explorer) == "5" for explorer in others)

    wait_until(all_serve_the_newest)
    assert answers <= {"v000003", "v000004", "v000005"}
    assert [said(explorer.chat(model="agent@2")) for explorer in others] == ["v000002"] * 2


def test_what_an_engine_serves_keeps_its_lease_while_it_hangs_in_a_load(start, scripted_engine, monkeypatch):
    monkeypatch.setattr(adapter_controller, "_RENEW_S", 0.5)
    both, script = [start(), start()], scripted_engine.script
    owner, follower = sorted(both, key=lambda one: not one.deps.leases.holds(scripted_engine.url))
    publish_and_wait(owner, 1, 2)
    owner.http.post("/versions/0/promote").raise_for_status()
    wait_until(lambda: served(follower) == "0")
    assert said(follower.chat(model="agent@1")) == "v000001"
    key, loading = owner.deps.leases.key(scripted_engine.url), threading.Event()
    script.on_call["/v1/load_lora_adapter"] = loading.set
    script.hung.add("/v1/load_lora_adapter")
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(owner.chat, model="agent@2")
        assert loading.wait(60)
        with owner.ledger.write() as connection:
            serving = (version_leases.c.reader == key, version_leases.c.purpose == Purpose.SERVING)
            soon = database_time(connection) + 3
            connection.execute(update(version_leases).where(*serving).values(until=soon))
        time.sleep(4)
        with owner.ledger.write() as connection:
            about = {"owner": "janitor", "max_versions": 0, "max_bytes": 0.0, "sizes": {}, "by": "trainer"}
            assert 1 not in transitions.give_up_files(connection, **about)
            assert 1 in queries.served_adapters(connection, key)
        assert said(follower.chat(model="agent@1")) == "v000001"
        script.hung.clear()
        assert said(reply.result()) == "v000002"


def leased(explorer: RunningExplorer, version: int) -> bool:
    """Whether an engine may have the version."""
    query = select(version_leases).where(version_leases.c.version == version)
    with explorer.ledger.read() as connection:
        return any(row.purpose == Purpose.UNLOADING for row in connection.execute(query))


def ask(http: httpx.Client, model: str) -> httpx.Response | None:
    """The answer of a chat; None: five versions are asked for, and there is room for four: it is another one's turn."""
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], "logprobs": True}
    try:
        return http.post("/chat", json=body, timeout=120 if model == "agent" else 5)
    except httpx.TimeoutException:
        assert model != "agent"
        return None


def test_rows_name_the_version_that_sampled_them_while_versions_come_and_pins_go_at_two_explorers(
    start, scripted_engine
):
    both = [start(room=2), start(room=2)]
    publish_and_wait(both[0], 1, 2)
    scripted_engine.script.tells_weights, scripted_engine.script.reload_s = True, 0.01
    wrong: list[str] = []
    counted: list[int] = []
    enough = threading.Event()

    def customer(explorer: RunningExplorer, number: int) -> None:
        with httpx.Client(base_url=explorer.url, timeout=120) as http:
            turn = number
            while not enough.is_set():
                turn += 1
                pin = (turn % 5) if number % 2 else None
                model = "agent" if pin is None else f"agent@{pin}"
                if (reply := ask(http, model)) is None:
                    continue
                if reply.status_code == 404 and pin is not None and pin > 2:
                    continue  # it is not published yet
                version = reply.headers.get("X-Flywheel-Version", reply.text)
                content = reply.json()["choices"][0]["logprobs"]["content"] if reply.status_code == 200 else []
                if [token["logprob"] for token in content] != [-float(version)] * 3 or pin not in (None, int(version)):
                    wrong.append(f"{pin} {version} {content}")
                counted.append(int(version))

    customers = [threading.Thread(target=customer, args=(both[n % 2], n // 2)) for n in range(8)]
    for thread in customers:
        thread.start()
    try:
        for version in range(3, 9):
            publish_adapter(both[0], version)
            wait_until(lambda version=version: version in counted)
        wait_until(lambda: {0, 1, 3, 4} <= set(counted))
    finally:
        enough.set()
    for thread in customers:
        thread.join()
    assert wrong == []
    with both[0].ledger.read() as connection:
        rows = connection.exec_driver_sql("SELECT version, version_end FROM experiences").all()
    assert all(row.version == row.version_end for row in rows)
    assert {row.version for row in rows} >= {0, 1, 3, 4, 8}
