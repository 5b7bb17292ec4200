"""What ends the workers of `explorer.workers`, and how the log names it."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from services.explorer import run_explorer
from services.supervisor import Child, Supervisor
from shared.stop_request import StopRequest
from tests.support.processes import wait_for
from tests.support.servers import make_config


@pytest.fixture
def folder_of_metrics(composed: list[Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Run an explorer of two workers, which do not start. Returns the folder that they would share metrics through."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def find() -> Path:
        config = make_config(tmp_path, ["http://127.0.0.1:1"], workers=2)
        assert run_explorer(config, tmp_path / "flywheel.yaml") == 0
        return Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])

    return find


def test_the_metrics_of_workers_are_in_memory_and_not_on_a_disk_that_may_be_full(folder_of_metrics):
    """A write to a mapped file ends a process with SIGBUS if the file system has no room for it."""
    folder = folder_of_metrics()
    assert folder.parent == Path("/dev/shm") and not folder.exists()


def test_a_machine_without_a_file_system_in_memory_has_them_in_its_temporary_folder(
    folder_of_metrics, tmp_path, monkeypatch
):
    monkeypatch.setattr("services.explorer._MEMORY", tmp_path / "none")
    assert folder_of_metrics().parent == tmp_path


@pytest.mark.parametrize(("ends", "named"), [("kill -BUS $$", "signal=SIGBUS"), ("exit 3", "status=3")])
def test_the_log_names_the_signal_that_ended_a_process_or_its_status(ends, named, tmp_path, monkeypatch, caplog):
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nulimit -c 0\n{ends}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    caplog.set_level(logging.WARNING, "flywheel.up")
    child, stop = Child("worker-0", ["explorer"]), StopRequest()
    running = threading.Thread(target=Supervisor([child], stop).run)
    running.start()
    wait_for(lambda: "restarting" in caplog.text, "the end of the child", 240)
    stop.set()
    running.join(240)
    assert named in caplog.text
