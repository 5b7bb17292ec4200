"""The command, and the lines of the README."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import flywheel
import pytest
from flywheel.__main__ import main

from tests.sdk.conftest import rows
from tests.support.processes import REPOSITORY

SNIPPETS = re.findall(r"```python\n(.*?)```", (REPOSITORY / "agent_sdk/README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.splitlines()[2][:40])
def test_the_readme_s_lines_run(explorer, scripted_engine, tmp_path, monkeypatch, snippet):
    monkeypatch.setenv("FLYWHEEL_URL", explorer.url)
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "README.md", "exec"), {"__name__": "snippet"})
    assert rows(explorer)
    assert all(row.reward is not None and row.state == "READY" for row in rows(explorer))


def test_the_file_in_the_products_readme_learns_and_draws(explorer, scripted_engine, tmp_path, monkeypatch):
    """But for its trainer, which this explorer does not have."""
    _, code = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    for name in ("tasks", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "6 * 7?", "answer": "42"}\n')
    monkeypatch.setenv("FLYWHEEL_URL", explorer.url)
    monkeypatch.chdir(tmp_path)
    code = code.replace("epochs=100", "epochs=1, require_trainer=False")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert re.fullmatch(r"[\d.]+ -> [\d.]+\n", said.getvalue())
    assert len(rows(explorer)) == 8 and all(row.reward is not None for row in rows(explorer))
    assert "<svg" in (tmp_path / "runs/first/report.html").read_text()


IN_DOCS = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/agents.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("snippet", IN_DOCS, ids=["people", "environment", "collector", "versions"])
def test_the_lines_of_the_documentation_run(explorer, tmp_path, monkeypatch, snippet):
    monkeypatch.setenv("FLYWHEEL_URL", explorer.url)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "snippet"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(snippet, "agents.md", "exec"), namespace)
        if "guesses" in namespace:
            report = flywheel.learn(namespace["guesses"], [{}], require_trainer=False, progress=False)
            assert report.rewarded == 1


def test_the_documented_options_of_learn_are_all_of_them_with_their_defaults():
    text = (REPOSITORY / "docs/agents.md").read_text()
    table = text[text.index("| option | default |") :].partition("\n\n")[0]
    documented = {
        name: ast.literal_eval(value) for name, value in re.findall(r"^\| `(\w+)` \| `(.+?)` \|", table, re.M)
    }
    assert documented == dataclasses.asdict(flywheel.LearnConfig())


@pytest.mark.parametrize("snippet", [*SNIPPETS, *IN_DOCS], ids=lambda snippet: snippet.splitlines()[2][:40])
def test_each_way_in_is_ten_lines_or_few_more(snippet):
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 12


# Of the documents that other frameworks describe themselves in.
CLASSES = """
    AgentScopeReActAgent AgentScopeReActWorkflow ModelWrapper OpenAIChatModel ReActAgent TrinityChatModel LearnConfig
    OpenAIChatFormatter ResponseStructure TrainingRunner TrainingContext TrainingAnnotation SelectionDecision
    SamplingRateStrategy ExplicitMarkingStrategy TrainingSelectionStrategy RewardCalculator ProductionAgent AgentCloner
    CustomStrategy CustomReward FeedbackRequest SimpleWorkflow MathWorkflow MultiTurnWorkflow AlfworldWorkflow WORKFLOWS
    WorkflowOutput JudgeOutput DatasetConfig AlgorithmConfig TunerModelConfig TinkerConfig OnlineTrainer TrinityRFT
    RLRuntime DataCollector HotUpdater MathAgentTrainer ToolUseTrainer ToolUseEvaluator MultiAgentGame GameTrainer
    RewardFunction TaskReward LLMJudge HumanPreferenceCollector DPOTrainer ModelManager ABTestFramework
"""


@pytest.mark.parametrize("name", CLASSES.split())
def test_their_name_has_one_of_ours(name):
    table = (REPOSITORY / "docs/agents.md").read_text().partition("## Names in other systems")[2]
    assert any(re.search(rf"\b{name}\b", line.split(" | ")[0]) for line in table.splitlines())


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    file = tmp_path / "tasks.csv"
    file.write_text("n\n1\n2\n3\n")
    return str(file)


def ended(*arguments: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        return main(list(arguments)), said.getvalue()


def test_learn_and_evaluate_from_a_shell(explorer, tasks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "options.json").write_text('{"require_trainer": false, "progress": false, "stop": {"patience": 9}}')
    workflow = "tests.sdk.shell_workflow:solve"
    status, said = ended(
        "learn", workflow, tasks, "--url", explorer.url, "--runs", "2", "--config", "options.json", "--eval", tasks
    )
    assert status == 0
    report = json.loads(said)
    assert (report["runs"], report["evaluations"][0]["n"]) == (6, 3)
    assert (tmp_path / "runs/learn/report.html").exists()
    status, said = ended("evaluate", workflow, tasks, "--url", explorer.url, "--version", "0")
    assert (status, json.loads(said)["version"]) == (0, 0)


@pytest.mark.parametrize("workflow", ["nothing", "tests.sdk.shell_workflow:none", "no.such:thing", "os:sep"])
def test_a_function_that_is_none_ends_with_one_line(tasks, capsys, workflow):
    assert main(["evaluate", workflow, tasks, "--url", "http://127.0.0.1:1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
