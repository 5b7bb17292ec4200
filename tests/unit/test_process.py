"""Processes whose parent dies, and which of them run by their names."""

import os
import subprocess
import sys
from pathlib import Path

from shared.process import is_gone, is_running, process_name

ADOPTS = """
import subprocess, psutil
from shared.process import adopt_orphans
adopt_orphans()
said = subprocess.run(["sh", "-c", "sleep 60 >&2 & echo $!"], stdout=subprocess.PIPE, check=True).stdout
(orphan,) = psutil.Process().children()
orphan.kill()
assert orphan.pid == int(said)
"""


def test_what_a_child_leaves_behind_when_it_ends_is_adopted():
    subprocess.run([sys.executable, "-c", ADOPTS], check=True, timeout=240)


def test_a_name_tells_whether_a_local_process_runs_and_is_unknown_for_a_remote_one():
    own = process_name()
    machine, pid, start, digits = own.split("-")
    assert (is_running(own), is_gone(own)) == (True, False)
    before = f"{machine}-{pid}-{int(start) + 1}-{digits}"  # that had this process id before
    assert (is_running(before), is_gone(before)) == (False, True)
    for elsewhere in (f"0123456789ab-{pid}-{start}-{digits}", "an engine's url", ""):
        assert (is_running(elsewhere), is_gone(elsewhere)) == (False, False)


def test_of_a_process_that_runs_and_whose_name_does_not_say_when_it_began_nothing_is_known():
    """It could not read that, for example because it had no free file descriptors."""
    machine, pid, _, digits = process_name().split("-")
    name = f"{machine}-{pid}-0-{digits}"
    assert (is_running(name), is_gone(name)) == (False, False)


def test_of_a_process_that_proc_hides_nothing_is_known(monkeypatch):
    """As those of other users are where /proc is mounted with hidepid: a service manager may do that."""
    name = process_name()

    def hidden(_file: Path) -> str:
        raise FileNotFoundError

    def refuse(_pid: int, _number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", hidden)
    monkeypatch.setattr(os, "kill", refuse)
    assert (is_running(name), is_gone(name)) == (False, False)


def test_a_process_that_has_ended_does_not_run_also_where_its_name_does_not_say_when_it_began():
    named = [sys.executable, "-c", "from shared.process import process_name; print(process_name())"]
    machine, pid, start, digits = subprocess.check_output(named, text=True, timeout=240).strip().split("-")
    assert is_gone(f"{machine}-{pid}-{start}-{digits}")
    assert not is_running(f"{machine}-{pid}-0-{digits}")
