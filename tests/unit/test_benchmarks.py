"""A benchmark is a program: started by its name, it says how it is called."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

PROGRAMS = sorted(Path(__file__).parents[2].glob("benchmarks/*/__main__.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=[path.parent.name for path in PROGRAMS])
def test_a_benchmark_prints_its_usage_for_help(program, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [str(program), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("usage:")
