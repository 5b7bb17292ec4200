"""Two explorers on one ledger, in front of one engine, behave as one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest
from sqlalchemy import select, update

from shared.errors import LedgerError
from shared.ledger import transitions
from shared.ledger.tables import engines, experiences
from tests.support.forms import DATABASES, FULL, one_database
from tests.support.heartbeats import frequent_heartbeats  # noqa: F401 — a fixture
from tests.support.processes import Process, descendants, wait_for, write_config
from tests.support.servers import RunningExplorer, free_port, make_config, publish, served, wait_joined, wait_until
from tests.support.waiting_feedback import feedback_that_waits

pytestmark = pytest.mark.usefixtures("frequent_heartbeats")


@pytest.fixture
def both(scripted_engine, start_explorer) -> list[RunningExplorer]:
    started = [start_explorer([scripted_engine.url], engine_wait_s=60.0).wait_ready() for _ in range(2)]
    wait_joined(started)
    return started


def test_what_one_says_the_other_knows(both):
    first, second = both
    known = first.chat().json()["id"]
    assert second.http.post("/feedback", json={"msg_ids": [known], "reward": 1}).json()["applied"] == 1
    assert first.http.post("/feedback", json={"msg_ids": [known], "reward": 1}).json()["receipts"] == [
        {"msg_id": known, "state": "duplicate"}
    ]
    assert second.http.post("/commit").json()["committed"] == 1
    assert first.http.get("/status").json()["rows"]["READY"] == 1


@one_database
def test_explorers_that_are_configured_otherwise_say_in_what(both, scripted_engine, start_explorer):
    other = start_explorer([scripted_engine.url], reward={"down": -1.0}).wait_ready()

    def said(explorer: RunningExplorer) -> list[str]:
        status = explorer.http.get("/status").json()
        return list(status.get("differing_explorers", {}).values())  # none while the database is slow

    wait_until(lambda: said(other) == 2 * ["reward.down is -1.0 here and 0.0 there"])
    wait_until(lambda: said(both[0]) == ["reward.down is 0.0 here and -1.0 there"])
    assert other.chat().status_code == 200


@one_database
def test_both_follow_a_new_version_and_only_one_reloads(both, scripted_engine):
    publish(both[0], 1)
    wait_until(lambda: all(served(explorer) == "1" for explorer in both))
    assert scripted_engine.script.calls.count("reload v000001") == 1


def test_no_chat_of_either_crosses_a_reload_with_a_wrong_label(both, scripted_engine):
    """Each reply says which weights gave it; each row must say that this version sampled its end."""
    scripted_engine.script.delay_s = 0.02
    scripted_engine.script.reload_s = 0.1
    publish(both[0], 1)
    wait_until(lambda: all(served(explorer) == "1" for explorer in both))
    said: dict[str, str] = {}
    enough = threading.Event()

    def customer(explorer: RunningExplorer) -> None:
        with httpx.Client(base_url=explorer.url, timeout=120) as http:
            while not enough.is_set():
                reply = http.post("/chat", json={"messages": [{"role": "user", "content": "x"}]})
                assert reply.status_code == 200
                said[reply.json()["id"]] = reply.json()["choices"][0]["message"]["content"].rpartition(" ")[2]

    customers = [threading.Thread(target=customer, args=(both[n % 2],)) for n in range(6)]
    for thread in customers:
        thread.start()
    try:
        for version in (2, 3, 4):
            wait_until(lambda: f"v{version - 1:06d}" in list(said.values()))  # noqa: B023
            publish(both[0], version)
        wait_until(lambda: "v000004" in list(said.values()))
    finally:
        enough.set()
    for thread in customers:
        thread.join()
    with both[0].ledger.read() as connection:
        rows = connection.execute(select(experiences.c.msg_id, experiences.c.version_end)).all()
    labels = {row.msg_id: f"v{row.version_end:06d}" for row in rows}
    assert {labels[name] for name in said} == {"v000001", "v000002", "v000003", "v000004"}
    assert {name: labels[name] for name in said} == said


def test_feedback_to_one_waits_for_a_stream_of_the_other(both, scripted_engine):
    scripted_engine.script.streams_wait = True
    streaming, ids = begin_stream(both[0])
    with feedback_that_waits(both[1], msg_ids=ids, reward=1) as answers:
        scripted_engine.script.streams_wait = False
    receipts = answers[0]["receipts"]
    streaming.join()
    assert receipts == [{"msg_id": ids[0], "state": "applied"}]


@one_database
@pytest.mark.parametrize("asked", [0, 1])
def test_feedback_for_a_run_waits_for_its_streams_and_for_no_others(both, scripted_engine, asked):
    for name in ("run/t/1", "run/t/2"):
        both[0].http.post(f"/{name}/chat", json={"messages": []}).raise_for_status()
    scripted_engine.script.streams_wait = True
    streaming, ids = begin_stream(both[0], "/run/t/1/chat")
    other = both[asked].http.post("/feedback", json={"task_id": "t", "run_id": 2, "reward": 1}).json()
    assert streaming.is_alive()
    with feedback_that_waits(both[asked], task_id="t", run_id=1, reward=1) as answers:
        scripted_engine.script.streams_wait = False
    receipts = answers[0]["receipts"]
    streaming.join()
    assert (other["applied"], len(receipts)) == (1, 2)
    assert receipts[1] == {"msg_id": ids[0], "state": "applied"}


@one_database
@pytest.mark.parametrize("asked", [0, 1])
def test_feedback_for_a_task_waits_for_the_streams_of_its_runs_and_for_no_others(both, scripted_engine, asked):
    both[0].http.post("/run/other/1/chat", json={"messages": []}).raise_for_status()
    scripted_engine.script.streams_wait = True
    streaming, ids = begin_stream(both[0], "/run/t/1/chat")
    other = both[asked].http.post("/feedback", json={"task_id": "other", "reward": 1}).json()
    assert streaming.is_alive()
    with feedback_that_waits(both[asked], task_id="t", reward=1) as answers:
        scripted_engine.script.streams_wait = False
    receipts = answers[0]["receipts"]
    streaming.join()
    assert (other["applied"], receipts) == (1, [{"msg_id": ids[0], "state": "applied"}])


def test_a_stream_that_began_before_there_was_another_explorer_is_waited_for_too(scripted_engine, start_explorer):
    first = start_explorer([scripted_engine.url]).wait_ready()
    scripted_engine.script.streams_wait = True
    streaming, ids = begin_stream(first)
    second = start_explorer([scripted_engine.url])
    wait_until(lambda: open_streams_of(first) == 1)  # the first one has told it
    with feedback_that_waits(second, msg_ids=ids, reward=1) as answers:
        scripted_engine.script.streams_wait = False
    receipts = answers[0]["receipts"]
    streaming.join()
    assert receipts == [{"msg_id": ids[0], "state": "applied"}]
    wait_until(lambda: open_streams_of(first) == 0)


def test_a_caller_who_leaves_while_the_others_are_told_of_its_stream_leaves_no_stream_behind(both):
    first, second = both
    first.http.post("/run/t/1/chat", json={"messages": []}).raise_for_status()
    with first.ledger.write() as connection:  # somebody else's transaction
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("LOCK TABLE open_streams IN EXCLUSIVE MODE")
        with pytest.raises(httpx.TimeoutException):
            first.http.post("/run/t/1/chat", json={"messages": [], "stream": True}, timeout=0.2)
        time.sleep(0.2)  # the explorer has noticed
    wait_until(lambda: open_streams_of(first) == 0)
    assert second.http.post("/feedback", json={"task_id": "t", "run_id": 1, "reward": 1}).json()["applied"] == 1


def begin_stream(explorer: RunningExplorer, path: str = "/chat") -> tuple[threading.Thread, list[str]]:
    """A stream that goes on in its thread, and its id."""
    ids: list[str] = []

    def stream() -> None:
        with explorer.http.stream("POST", path, json={"messages": [], "stream": True}) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {") and not ids:
                    ids.append(json.loads(line[6:])["id"])

    streaming = threading.Thread(target=stream)
    streaming.start()
    wait_until(lambda: bool(ids))
    return streaming, ids


def open_streams_of(explorer: RunningExplorer) -> int:
    with explorer.ledger.read() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM open_streams").scalar_one())


def test_a_stream_whose_end_the_ledger_does_not_take_is_whole_and_told_with_the_next_heartbeat(both, monkeypatch):
    first, second = both
    wait_until(lambda: not first.deps.membership.is_alone)
    refused = iter([LedgerError("a fault was put in")])
    close = transitions.close_stream

    def failing(connection, msg_id):
        if error := next(refused, None):
            raise error
        close(connection, msg_id)

    monkeypatch.setattr(transitions, "close_stream", failing)
    with first.http.stream("POST", "/chat", json={"messages": [], "stream": True}) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    msg_id = json.loads(lines[0].removeprefix("data: "))["id"]
    answer = second.http.post("/feedback", json={"msg_ids": [msg_id], "reward": 1}).json()
    assert (answer["applied"], open_streams_of(first), next(refused, None)) == (1, 0, None)


@one_database
def test_when_the_owner_signs_off_another_takes_the_engine_over(both, scripted_engine):
    with both[0].ledger.read() as connection:
        owner = connection.execute(select(engines.c.owner)).scalar_one()
    leaving = next(explorer for explorer in both if explorer.deps.membership.id == owner)
    (staying,) = (explorer for explorer in both if explorer is not leaving)
    publish(leaving, 1)
    wait_until(lambda: all(served(explorer) == "1" for explorer in both))
    leaving.stop()
    wait_until(lambda: staying.http.get("/status").json()["engines"][0]["owned"])
    publish(staying, 2)
    wait_until(lambda: served(staying) == "2")
    loads = [call for call in scripted_engine.script.calls if call.startswith("reload")]
    assert loads == ["reload v000001", "reload v000002"]  # what it holds already is not loaded again


def test_an_engine_whose_owner_died_within_a_reload_is_taken_over_when_its_lease_ends(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], engine_wait_s=0.5).wait_ready()  # for so long a reload is ready
    leases, acquire, is_seen = explorer.deps.leases, explorer.deps.leases.acquire, threading.Event()

    async def acquire_once_it_is_seen(url):
        return is_seen.is_set() and await acquire(url)

    leases.acquire = acquire_once_it_is_seen
    with explorer.ledger.write() as connection:  # as a killed owner leaves it
        ghost = {"owner": "ghost", "owner_until": time.time() + 2.0, "state": "reloading", "version": None}
        connection.execute(update(engines).values(generation=engines.c.generation + 1, **ghost))
    leases.forget(scripted_engine.url)
    scripted_engine.script.paused = True
    wait_until(lambda: explorer.http.get("/ready").status_code == 503)
    is_seen.set()
    wait_until(lambda: explorer.http.get("/ready").status_code == 200)
    assert not scripted_engine.script.paused


def test_an_engine_whose_owner_was_killed_on_this_machine_is_free_with_the_next_heartbeat(explorer):
    command = [
        sys.executable,
        "-c",
        "import shared.process as l, time; print(l.process_name(), flush=True); time.sleep(99)",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        name = other.stdout.readline().strip()
        with explorer.ledger.write() as connection:
            transitions.heartbeat(connection, name, {})
            assert transitions.acquire_engine(connection, "http://e1", name)
            assert name in transitions.heartbeat(connection, "me", {})
            assert not transitions.acquire_engine(connection, "http://e1", "me")
        other.kill()
    with explorer.ledger.write() as connection:
        assert name not in transitions.heartbeat(connection, "me", {})
        assert transitions.acquire_engine(connection, "http://e1", "me")


@pytest.mark.parametrize("database_url", DATABASES if FULL else ["postgresql"], indirect=True)
def test_workers_share_a_port_and_answer_as_one(scripted_engine, tmp_path, database_url):
    config = make_config(tmp_path, [scripted_engine.url], database_url=database_url, workers=3, port=free_port())
    file = write_config(config, tmp_path / "flywheel.yaml")
    url, to_any = f"http://127.0.0.1:{config.explorer.port}", {"Connection": "close"}
    http = httpx.Client(base_url=url, headers=to_any, timeout=120)
    with http, Process(["explorer", "-c", str(file)], tmp_path / "explorer.log") as process:
        wait_for(lambda: process.output().count("listening") == 3, "three workers", 240)
        wait_for(lambda: http.get("/ready").status_code == 200, "service", 240)
        family = descendants(process.pid)
        ids = []
        for _ in range(24):  # a new connection each time: the kernel gives it to any of them
            ids.append(http.post("/chat", json={"messages": []}).raise_for_status().json()["id"])
        assert len(set(ids)) == 24
        answers = [http.post("/feedback", json={"msg_ids": [name], "reward": 1}).json() for name in ids]
        assert [answer["applied"] for answer in answers] == [1] * len(ids)
        assert http.post("/commit").json()["committed"] == len(ids)
        counts = {_count(http.get("/metrics").text, "flywheel_feedback_receipts_total") for _ in range(6)}
        assert counts == {float(len(ids))}
        assert process.stop(240) == 0
    assert not [pid for pid in family if psutil.pid_exists(pid)]
    assert "Traceback" not in process.output()


def _count(text: str, metric: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(metric + "{"))
