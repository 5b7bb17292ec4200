"""Where `flywheel convert-config` writes its files."""

from __future__ import annotations

import errno
import os
import shlex
from pathlib import Path

import pytest

from services import cli

TRINITY = """
model: {model_path: ./base}
buffer:
  explorer_input:
    taskset: {path: ./the tasks.jsonl}
    default_workflow_type: math_workflow
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("trinity.yaml").write_text(TRINITY)


def convert(out: str) -> int:
    return cli.main(["convert-config", "trinity.yaml", "--lenient", "-o", out])


@pytest.mark.parametrize("folder", [".", "/", ""])
def test_a_folder_is_no_name_for_the_file(folder, capsys):
    assert convert(folder) == 2
    assert capsys.readouterr().err.endswith("exists; name another file with -o, in another folder\n")
    assert list(Path().iterdir()) == [Path("trinity.yaml")]


@pytest.mark.parametrize("name", ["learn.yaml", "workflow.py"])
def test_a_name_of_the_agent_s_side_is_refused(name, capsys):
    assert convert(name) == 2
    assert f"{name} is a file of the agent's side" in capsys.readouterr().err
    assert list(Path().iterdir()) == [Path("trinity.yaml")]


def test_the_printed_command_can_be_pasted_whatever_the_names_are(capsys):
    Path("it's here").mkdir()
    assert convert("it's here/flywheel.yaml") == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[0] == "PYTHONPATH=it's here"
    assert words[words.index("learn") :] == [
        "learn",
        "workflow:workflow",
        "./the tasks.jsonl",
        "--config",
        "it's here/learn.yaml",
        "--url",
        "http://127.0.0.1:8010",
    ]


def test_a_full_disk_leaves_no_file_behind(monkeypatch, capsys):
    write_text = Path.write_text

    def on_a_full_disk(self: Path, text: str, encoding: str | None = None) -> int:
        if self.name == "learn.yaml":
            write_text(self, text[:10], encoding)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return write_text(self, text, encoding)

    monkeypatch.setattr(Path, "write_text", on_a_full_disk)
    assert convert("flywheel.yaml") == 1
    assert "learn.yaml: No space left on device; free space there" in capsys.readouterr().err
    assert list(Path().iterdir()) == [Path("trinity.yaml")]
