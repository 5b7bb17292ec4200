"""`flywheel up`: ordered start, one log, restart with backoff, and no process left behind."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.engine.ending import DRAIN_S, LONGEST_S
from services.explorer import _GRACE_S, run_explorer
from services.supervisor import STOP_TIMEOUT_S, Child, Supervisor, listen_for_two
from shared.errors import StartupError
from shared.ledger.connect import Ledger
from shared.ledger.driver import answering_within
from shared.stop_request import StopRequest
from tests.support.experiences import trainer_config
from tests.support.models import make_tiny_model
from tests.support.processes import Process, descendants, run_here, wait_for, write_config
from tests.support.servers import free_port, make_config


@contextlib.contextmanager
def started(tmp_path: Path, said: tuple[str, ...] = ("at work", "listening"), **trainer: object) -> Iterator[Process]:
    """explorer and trainer, no engine: what is tested here needs none. said: what their output must contain."""
    model = make_tiny_model(tmp_path / "base")
    config = trainer_config(tmp_path / "data", model, **trainer)
    engines = [{"name": "e0", "url": f"http://127.0.0.1:{free_port()}"}]
    config = type(config).model_validate(
        {**config.model_dump(exclude_unset=True), "explorer": {"port": free_port(), "engines": engines}},
    )
    file = write_config(config, tmp_path / "flywheel.yaml")
    with Process(["up", "-c", str(file), "--without", "engines"], tmp_path / "up.log") as process:
        wait_for(lambda: all(one in process.output() for one in said), " and ".join(said), 240)
        yield process


def stop(up: Process, number: signal.Signals) -> None:
    """Ask it to stop: it ends all, and leaves no process behind."""
    family = descendants(up.pid)
    assert len(family) >= 2
    assert up.stop(240, number) == 0
    assert not [pid for pid in family if psutil.pid_exists(pid)]
    assert "Traceback" not in up.output()
    assert up.output().rstrip().endswith("stopped")


@pytest.mark.parametrize("workers", [1, 2])
def test_an_explorer_that_is_asked_to_stop_while_it_opens_its_ledger_serves_nobody(workers, tmp_path, monkeypatch):
    config = make_config(tmp_path, ["http://127.0.0.1:1"], workers=workers)
    opened = Ledger.open

    def open_when_asked_to_stop(*args: object) -> Ledger:
        signal.raise_signal(signal.SIGTERM)
        return opened(*args)

    def serve(*_: object, **__: object) -> None:
        pytest.fail("it serves")

    monkeypatch.setattr("services.explorer.Ledger.open", open_when_asked_to_stop)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")  # restored afterwards
    monkeypatch.setattr("uvicorn.Server.run", serve)
    monkeypatch.setattr("services.supervisor.Supervisor._watch", serve)
    monkeypatch.setattr("services.supervisor.Supervisor._start", lambda *_: None)
    assert run_explorer(config, tmp_path / "flywheel.yaml") == 0


def test_an_explorer_gives_its_ledger_the_time_that_its_callers_wait(tmp_path, monkeypatch):
    config = make_config(tmp_path, ["http://127.0.0.1:1"], ledger_timeout_s=7.0)
    opened: list[object] = []

    def refuse(*args: object) -> Ledger:
        opened.append(args)
        raise StartupError("no ledger")

    monkeypatch.setattr("services.explorer.Ledger.open", refuse)
    with pytest.raises(StartupError, match="no ledger"):
        run_explorer(config, tmp_path / "flywheel.yaml")
    assert opened == [(config.ledger_url, answering_within(7.0))]


def test_killed_itself_it_takes_its_processes_along(tmp_path):
    with started(tmp_path, said=("listening",)) as up:
        wait_for(lambda: trainers_of(up), "the trainer's process", 240)
        family = descendants(up.pid)
        assert len(family) >= 2
        psutil.Process(up.pid).kill()
        wait_for(lambda: not [pid for pid in family if psutil.pid_exists(pid)], "the end of all", 240)


def test_a_crashed_process_starts_again_and_asked_to_stop_it_ends_all_and_leaves_no_process_behind(tmp_path):
    with started(tmp_path) as up:
        (trainer,) = trainers_of(up)
        trainer.kill()
        wait_for(lambda: up.output().count("at work") == 2, "a second trainer at work", 240)
        assert "ended by itself; restarting" in up.output()
        stop(up, signal.SIGINT)


def test_a_rank_that_dies_takes_its_job_along_and_all_of_them_start_again(tmp_path):
    with started(tmp_path, ranks=2) as up:
        before = ranks_of(up)
        before[1].kill()
        wait_for(lambda: up.output().count("at work") == 2, "two ranks at work again", 240)
        after = ranks_of(up)
        assert len(before) == len(after) == 2 and not set(before) & set(after)
        assert not any(one.is_running() for one in before)
        stop(up, signal.SIGTERM)
        assert not any(one.is_running() for one in after)


def trainers_of(up: Process) -> list[psutil.Process]:
    return [one for one in psutil.Process(up.pid).children() if "trainer" in one.cmdline()]


def ranks_of(up: Process) -> list[psutil.Process]:
    (trainer,) = trainers_of(up)
    return [one for one in trainer.children() if "trainer" in one.cmdline()]


def test_a_refused_configuration_stops_all_and_is_not_tried_again():
    child = Child("broken", ["status", "-c", "no-such-file"])
    assert Supervisor([child], StopRequest()).run() == 2
    assert child.failures == 0


def test_packages_with_the_names_of_ours_in_the_working_folder_are_not_taken_for_ours(tmp_path, monkeypatch):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/__init__.py").touch()
    (tmp_path / "shared/errors.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert status_of_a_child() == 0


def test_a_log_that_cannot_be_written_stops_nobody(monkeypatch):
    with contextlib.suppress(OSError), Path("/dev/full").open("w") as full:
        monkeypatch.setattr("services.supervisor.sys.stderr", full)
        assert status_of_a_child() == 0


def status_of_a_child() -> int:
    """The exit status of a supervised process that ends by itself."""
    stop = StopRequest()
    child = Child("lister", ["demo", "--list"])
    running = threading.Thread(target=Supervisor([child], stop).run)
    running.start()
    wait_for(lambda: child.restart_at is not None, "the end of the child", 240)
    stop.set()
    running.join(240)
    assert child.process is not None and child.process.returncode is not None
    return child.process.returncode


def test_the_pause_before_a_restart_grows(monkeypatch, tmp_path):
    monkeypatch.setattr("services.supervisor.BACKOFF_S", (0.01, 0.02, 600.0))
    monkeypatch.setattr("services.supervisor.STABLE_AFTER_S", 600.0)  # also where a start takes long
    config = write_config(trainer_config(tmp_path / "data", tmp_path / "no-model"), tmp_path / "flywheel.yaml")
    stop = StopRequest()
    child = Child("broken", ["export", "-c", str(config), "--out", str(tmp_path / "rows.csv")])  # ends with status 1
    running = threading.Thread(target=Supervisor([child], stop).run)
    running.start()
    wait_for(lambda: child.failures == 3 and child.restart_at is not None, "three failures", 240)
    assert child.restart_at - time.monotonic() > 300
    stop.set()
    running.join(240)
    assert not running.is_alive()


@pytest.fixture
def program(tmp_path, monkeypatch) -> Path:
    """What children run in place of Python: their first argument is code, and no command."""
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "$4"\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    return program


def code(ready: Path, on_sigterm: str) -> str:
    """Code that writes its process id to a file once it handles SIGTERM, and then waits."""
    return (
        "import os, pathlib, signal, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: {on_sigterm})\n"
        f"pathlib.Path({str(ready)!r}).write_text(f'{{os.getpid()}} ')\n"
        "while True: time.sleep(600)"
    )


@contextlib.contextmanager
def supervised(children: list[Child], ready: list[Path], *stops: StopRequest) -> Iterator[None]:
    """In this block the children run; it must request a stop, and all end after it."""
    running = threading.Thread(target=Supervisor(children, *stops).run)
    running.start()
    wait_for(lambda: all(file.exists() and file.read_text().endswith(" ") for file in ready), "the children", 240)
    yield
    running.join(240)
    assert not running.is_alive()


@pytest.mark.usefixtures("program")
def test_a_child_has_its_own_time_to_end_and_is_killed_after_that(tmp_path):
    hangs, saves = tmp_path / "hangs", tmp_path / "saves"
    children = [
        Child("hangs", [code(hangs, "None")], stop_timeout_s=0.5),
        Child("saves", [code(saves, "(time.sleep(3), os._exit(0))")], stop_timeout_s=240),
    ]
    stop = StopRequest()
    with supervised(children, [hangs, saves], stop):
        stop.set()
    assert [child.process.returncode for child in children if child.process] == [-signal.SIGKILL, 0]


@pytest.mark.usefixtures("program")
def test_a_second_signal_kills_what_takes_long_to_end_and_a_repeat_of_the_first_does_not(tmp_path, monkeypatch):
    stop, kill = StopRequest(), StopRequest()
    listen_for_two(stop, kill)
    child = Child("hangs", [code(tmp_path / "hangs", "None")], stop_timeout_s=3600)
    with supervised([child], [tmp_path / "hangs"], stop, kill):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop and not kill and child.alive
        monkeypatch.setattr("services.supervisor.REPEATED_S", 0.0)
        signal.raise_signal(signal.SIGINT)
    assert child.process is not None and child.process.returncode == -signal.SIGKILL


def test_a_worker_that_hangs_ends_with_its_supervisor_even_if_that_one_is_killed(tmp_path, program):
    worker = code(tmp_path / "worker", "None")
    nested = f"""
import signal, sys
sys.executable = {str(program)!r}
from services.supervisor import Child, Supervisor
from shared.stop_request import StopRequest
worker = Child("worker", [{worker!r}], stop_timeout_s=3600, death_signal=signal.SIGKILL)
Supervisor([worker], StopRequest().listen()).run()
"""
    child, stop = Child("explorer", [nested], stop_timeout_s=1), StopRequest()
    with supervised([child], [tmp_path / "worker"], stop):
        stop.set()
    assert child.process is not None and child.process.returncode == -signal.SIGKILL
    pid = int((tmp_path / "worker").read_text())
    wait_for(lambda: not psutil.pid_exists(pid), "the end of the worker", 240)


def test_the_trainer_has_time_to_save_and_workers_end_before_their_explorer_is_killed(composed, tmp_path):
    config = make_config(tmp_path, [f"http://127.0.0.1:{free_port()}"], workers=2)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").touch()
    assert run_here(config, "up") == 0
    limits = {child.name: child.stop_timeout_s for child in composed}
    assert limits["trainer"] > config.trainer.rank_timeout_s
    assert limits["engine-e0"] == limits["explorer"] == STOP_TIMEOUT_S
    assert _GRACE_S < DRAIN_S < LONGEST_S < limits["engine-e0"]
    composed.clear()
    assert run_explorer(config, tmp_path / "flywheel.yaml") == 0
    assert len(composed) == 2
    assert all(child.stop_timeout_s < limits["explorer"] for child in composed)
    assert {child.death_signal for child in composed} == {signal.SIGKILL}
