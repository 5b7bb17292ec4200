"""A benchmark is a program: started by its name, it says how it is called, and refuses parts that it does not have."""

from __future__ import annotations

import asyncio
import runpy
import signal
import socket
from pathlib import Path

import pytest

from benchmarks import agent_sdk
from benchmarks.front_door.running import end_on_sigterm, run

PROGRAMS = sorted(Path(__file__).parents[2].glob("benchmarks/*/__main__.py"))
IN_PARTS = [path for path in PROGRAMS if '"--only"' in path.read_text()]


@pytest.mark.parametrize("program", PROGRAMS, ids=[path.parent.name for path in PROGRAMS])
def test_a_benchmark_prints_its_usage_for_help(program, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [str(program), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("usage:")


@pytest.mark.parametrize("program", IN_PARTS, ids=[path.parent.name for path in IN_PARTS])
def test_a_benchmark_refuses_a_part_that_it_does_not_have(program, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [str(program), "--only", "nothing"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")
    assert ended.value.code == 2 and "invalid choice: 'nothing'" in capsys.readouterr().err


def test_the_parts_of_the_agents_side_have_one_spelling():
    said = (agent_sdk.__doc__ or "").partition("Parts: ")[2].partition(".")[0]
    assert tuple(said.replace("\n", " ").split(", ")) == agent_sdk.PARTS


class Terminated(asyncio.Protocol):
    """SIGTERM comes while it gets data."""

    def data_received(self, data: bytes) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_sigterm_ends_a_benchmark_also_in_a_callback_of_its_loop():
    ours, theirs = socket.socketpair()

    async def receive() -> None:
        transport, _ = await asyncio.get_running_loop().create_connection(Terminated, sock=ours)
        theirs.send(b"hello")
        try:
            await asyncio.sleep(30)
        finally:
            transport.abort()
            await asyncio.sleep(0)

    end_on_sigterm()
    try:
        with pytest.raises(SystemExit, match="stopped"):
            run(receive())
        with pytest.raises(SystemExit, match="stopped"):
            signal.raise_signal(signal.SIGTERM)
    finally:
        theirs.close()
