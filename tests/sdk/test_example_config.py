"""`--config FILE`: an example learns with options of learn from a file, such as convert-config writes."""

from __future__ import annotations

import json

import pytest

from examples.run import learn_options, parser, run
from tests.sdk.conftest import rows
from tests.sdk.test_example_run import example
from tests.support.time_limits import end_when


def play(explorer, tmp_path, options: dict[str, object]) -> int:
    """The exit status of the example with a file that has these options."""
    (tmp_path / "learn.yaml").write_text(json.dumps(options))
    arguments = ["--url", explorer.url, "--minutes", "0.02", "--root", str(tmp_path / "root")]
    arguments += ["--config", str(tmp_path / "learn.yaml")]
    return run(example(), parser("sums", "sums").parse_args(arguments))


def test_the_options_of_the_file_replace_the_example_s(explorer, scripted_engine, tmp_path, monkeypatch):
    end_when(monkeypatch, lambda: len(rows(explorer)) > 4)
    assert play(explorer, tmp_path, {"name": "one", "runs_per_task": 3, "params": {"max_tokens": 9, "seed": 5}}) == 0
    runs = [json.loads(line)["place"] for line in (tmp_path / "root/episodes.jsonl").read_text().splitlines()]
    assert {run.rpartition("#")[2] for run in runs} == {"0", "1", "2"}
    assert all(run.startswith("one/") for run in runs)
    assert {(body["max_tokens"], body["seed"]) for body in scripted_engine.script.bodies if "seed" in body} == {(9, 5)}


def test_the_file_s_params_leave_those_of_the_example_that_it_does_not_name(tmp_path):
    file = tmp_path / "learn.yaml"
    file.write_text(json.dumps({"name": "one", "params": {"temperature": 0.5}}))
    own = {"runs_per_task": 8, "params": {"max_tokens": 256, "temperature": 1.0}}
    options = {"name": "one", "runs_per_task": 8, "params": {"max_tokens": 256, "temperature": 0.5}}
    assert learn_options(own, file) == options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"run_per_task": 3}, "run_per_task is no option of learn; did you mean runs_per_task?"),
        ({"runs_per_task": 0}, "runs_per_task=0: give a whole number of 1 or more"),
    ],
)
def test_a_file_that_learn_does_not_read_is_refused_in_one_line_before_the_folder_is_emptied(
    options, said, explorer, tmp_path, capsys
):
    assert play(explorer, tmp_path, options) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"sums: {said}"
    assert not (tmp_path / "root").exists()
